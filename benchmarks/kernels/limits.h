// Timing of a training kernel against what the machine can do: `run` calls an op over and over and
// reports GFLOP/s, GB/s and limit_share, the least time that its work could take over its time.
//
// The work is what the op itself tells a profile (core/profile.h); the limits, a matrix rate and a
// memory rate of all threads, are measured once per process. An op whose operands stay in the cache
// can pass the memory limit, so its share can be above 1.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>

#include "banyan/bench/machine_rates.h"
#include "banyan/core/memory.h"
#include "banyan/core/profile_report.h"

namespace banyan {

struct Limits {
  double flops_per_s = 0.0;
  double bytes_per_s = 0.0;
};

inline const Limits& limits() {
  static const Limits measured = [] {
    const bench::MemoryRates memory = bench::measure_memory();
    return Limits{bench::measure_matrix_rate(),
                  std::max(memory.read_bytes_per_s, memory.copy_bytes_per_s)};
  }();
  return measured;
}

// Times `op`, which must open at least one profile scope. Its first call is not timed.
template <typename Op>
void run(benchmark::State& state, const Op& op) {
  keep_freed_memory();  // as in training: outputs are not fetched from the kernel page by page
  profile::start();
  op();
  double flops = 0.0;
  double bytes = 0.0;
  for (const profile::Row& row : profile::table(profile::stop())) {
    flops += static_cast<double>(row.flops + row.repeated);
    bytes += static_cast<double>(row.bytes);
  }
  const double least = std::max(flops / limits().flops_per_s, bytes / limits().bytes_per_s);
  for (auto _ : state) op();
  const auto rate = [](double amount) {
    return benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate);
  };
  state.counters["GFLOP/s"] = rate(flops * 1e-9);
  state.counters["GB/s"] = rate(bytes * 1e-9);
  state.counters["limit_share"] = rate(least);
}

}  // namespace banyan
