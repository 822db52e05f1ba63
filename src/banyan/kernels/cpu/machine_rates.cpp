#include "banyan/kernels/cpu/machine_rates.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/team.h"

namespace banyan::kernels {
namespace {

constexpr int kRounds = 5;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Reads everything; the result keeps the compiler from leaving it out.
BANYAN_MULTIVERSION
uint64_t sweep(const uint64_t* data, int64_t count) {
  uint64_t lanes[32] = {};
  for (int64_t i = 0; i + 32 <= count; i += 32) {
    for (int64_t l = 0; l < 32; ++l) lanes[l] ^= data[i + l];
  }
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all ^= lane;
  return all;
}

// Seconds of the best round of work(member) by all.
template <typename Work>
double best_round(const Work& work) {
  double best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    double start = 0.0;
    Team::run([&](Team::Member& member) {
      member.barrier();
      if (member.rank() == 0) start = seconds();
      member.barrier();
      work(member);
      member.barrier();
      if (member.rank() == 0) best = std::min(best, seconds() - start);
    });
  }
  return best;
}

}  // namespace

MachineRates measure_rates(const c10::BFloat16* data, int64_t count, int64_t rows, int64_t depth) {
  MachineRates rates;
  const int64_t words = count / 4;
  std::vector<uint64_t> found(at::get_num_threads());
  const double read = best_round([&](const Team::Member& member) {
    const int64_t first = member.first_of(words);
    const uint64_t* from = reinterpret_cast<const uint64_t*>(data) + first;
    found[member.rank()] ^= sweep(from, member.last_of(words) - first);
  });
  rates.read_bytes_per_second = static_cast<double>(words * 8) / read;

  constexpr int64_t kPanels = 4;
  constexpr int64_t kRepeats = 40;
  const int64_t padded = round_up(depth, 2);
  const std::vector<BFloat16> a(round_up(rows, kRowStep) * padded, BFloat16(0.5f));
  const std::vector<BFloat16> panels(kPanels * padded * kPanel, BFloat16(0.25f));
  const double multiply = best_round([&](const Team::Member&) {
    std::vector<float> c(kRowTile * kPanel);
    for (int64_t i = 0; i < kRepeats * kPanels; ++i) {
      const BFloat16* panel = panels.data() + i % kPanels * padded * kPanel;
      for (int64_t row = 0; row < rows; row += kRowTile) {
        const int64_t n = round_up(std::min(kRowTile, rows - row), row_step());
        gemm_tile(
            {a.data() + row * padded, padded, n}, panel, padded, kPanel, false, c.data(), kPanel);
      }
    }
    gemm_release();
  });
  const double flops = 2.0 * static_cast<double>(kRepeats * kPanels * rows * depth * kPanel);
  rates.flops_per_second = flops * static_cast<double>(at::get_num_threads()) / multiply;
  return rates;
}

}  // namespace banyan::kernels
