#include "banyan/bench/machine_rates.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "banyan/bench/median.h"
#include "banyan/core/error.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/ops/linear.h"
#include "banyan/train/clock.h"

namespace banyan::bench {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // bytes that one task reads
constexpr double kLeastSeconds = 0.02;        // of one timed run
constexpr int64_t kMostColumns = 4096;        // of a product: the head is multiplied in parts

struct Matrix {
  int64_t out = 0;
  int64_t in = 0;
  int64_t count = 0;  // so many in the model
};

// q, k and v as one, gate and up as one: as the decoder block multiplies them.
std::vector<Matrix> matrices_of(const models::ModelShape& s) {
  const int64_t attended = s.heads * s.head_dim;
  std::vector<Matrix> matrices = {{attended + 2 * s.kv_heads * s.head_dim, s.hidden, s.layers},
                                  {s.hidden, attended, s.layers},
                                  {s.vocab, s.hidden, 1}};
  const auto feed_forward = [&](int64_t width, int64_t count) {
    if (count == 0) return;
    matrices.push_back({2 * width, s.hidden, count});
    matrices.push_back({s.hidden, width, count});
  };
  feed_forward(s.intermediate, s.layers - s.moe_layers);
  feed_forward(s.moe_intermediate, s.moe_layers * s.num_experts);
  return matrices;
}

BANYAN_MULTIVERSION uint64_t fold(const uint64_t* words, int64_t count) {
  uint64_t folded = 0;
  for (int64_t i = 0; i < count; ++i) folded ^= words[i];
  return folded;
}

// Reads every byte of `x`; the result keeps the reads alive.
uint64_t read_all(const at::Tensor& x) {
  std::atomic<uint64_t> folded{0};
  const auto* words = static_cast<const uint64_t*>(x.const_data_ptr());
  const auto count = static_cast<int64_t>(x.nbytes() / sizeof(uint64_t));
  const int64_t step = kChunk / static_cast<int64_t>(sizeof(uint64_t));
  at::parallel_for(0, (count + step - 1) / step, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * step;
    folded ^= fold(words + first, std::min(end * step, count) - first);
  });
  return folded;
}

void keep(uint64_t value) {
  volatile uint64_t kept = value;
  (void)kept;
}

void copy_all(const at::Tensor& from, at::Tensor& to) {
  const auto size = static_cast<int64_t>(from.nbytes());
  at::parallel_for(0, (size + kChunk - 1) / kChunk, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kChunk;
    std::memcpy(static_cast<char*>(to.data_ptr()) + first,
                static_cast<const char*>(from.const_data_ptr()) + first,
                std::min(end * kChunk, size) - first);
  });
}

// Seconds of one call of `run`, the median of `repeats` timings of at least kLeastSeconds.
template <typename Run>
double seconds_of(int64_t repeats, const Run& run) {
  run();  // not timed
  std::vector<double> seconds;
  for (int64_t i = 0; i < repeats; ++i) {
    train::Clock clock;
    double total = 0.0;
    int64_t calls = 0;
    for (; total < kLeastSeconds; ++calls) {
      run();
      total += clock.lap();
    }
    seconds.push_back(total / static_cast<double>(calls));
  }
  return median(std::move(seconds));
}

}  // namespace

MachineRates measure_rates(const models::ModelShape& shape,
                           const ComputeOptions& options,
                           int64_t rows,
                           int64_t repeats) {
  BANYAN_CHECK(options.device.is_cpu() && options.dtype == at::kBFloat16,
               "[bench] rates: wanted a bf16 model on a CPU, got ",
               options.dtype,
               " on ",
               options.device);
  MachineRates rates;
  rates.rows = rows;
  ComputeOptions native = options;
  native.kernels = Kernels::kNative;
  std::vector<ops::LinearWeight> weights;
  double flops = 0.0;
  double packed_seconds = 0.0;
  double mm_seconds = 0.0;
  for (const Matrix& matrix : matrices_of(shape)) {
    const at::Tensor master = at::randn({matrix.out, matrix.in}, at::kFloat);
    for (int64_t i = 0; i < matrix.count; ++i) {
      ops::pack_weight(master, native, /*with_backward=*/false, weights.emplace_back());
      rates.weight_bytes += static_cast<int64_t>(weights.back().packed.nbytes());
    }
    const int64_t out = std::min(matrix.out, kMostColumns);
    const at::Tensor part = master.narrow(0, 0, out);
    ops::LinearWeight weight;
    ops::pack_weight(part, native, /*with_backward=*/false, weight);
    const at::Tensor x = at::randn({rows, matrix.in}, at::kFloat).to(at::kBFloat16);
    const at::Tensor transposed = part.to(at::kBFloat16).t();
    const double times = static_cast<double>(matrix.count * matrix.out) / static_cast<double>(out);
    flops += times * 2.0 * static_cast<double>(rows * out * matrix.in);
    packed_seconds += times * seconds_of(repeats, [&] { ops::linear_forward(x, weight, {}); });
    mm_seconds += times * seconds_of(repeats, [&] { at::mm(x, transposed); });
  }
  rates.packed_flops_per_s = flops / packed_seconds;
  rates.mm_flops_per_s = flops / mm_seconds;
  rates.flops_per_s = std::max(rates.packed_flops_per_s, rates.mm_flops_per_s);
  uint64_t folded = 0;
  const double read_seconds = seconds_of(repeats, [&] {
    for (const ops::LinearWeight& each : weights) folded ^= read_all(each.packed);
  });
  keep(folded);
  rates.bytes_per_s = static_cast<double>(rates.weight_bytes) / read_seconds;
  return rates;
}

double measure_matrix_rate(int64_t tries) {
  constexpr int64_t kRows = 2048;
  constexpr int64_t kSide = 1536;
  const at::Tensor a = at::randn({kRows, kSide}, at::kFloat).to(at::kBFloat16);
  const at::Tensor b = at::randn({kSide, kSide}, at::kFloat).to(at::kBFloat16);
  double best = std::numeric_limits<double>::max();
  for (int64_t i = 0; i < tries; ++i) {
    train::Clock clock;
    at::mm(a, b);
    best = std::min(best, clock.lap());
  }
  return 2.0 * static_cast<double>(kRows * kSide * kSide) / best;
}

MemoryRates measure_memory(int64_t num_bytes, int64_t repeats) {
  const at::Tensor from = at::ones({num_bytes}, at::kByte);
  at::Tensor to = at::zeros({num_bytes}, at::kByte);
  uint64_t folded = 0;
  double read_seconds = std::numeric_limits<double>::max();
  double copy_seconds = std::numeric_limits<double>::max();
  for (int64_t i = 0; i < repeats; ++i) {
    train::Clock clock;
    folded ^= read_all(from);
    read_seconds = std::min(read_seconds, clock.lap());
    copy_all(from, to);
    copy_seconds = std::min(copy_seconds, clock.lap());
  }
  keep(folded);
  const auto bytes = static_cast<double>(num_bytes);
  return {.read_bytes_per_s = bytes / read_seconds, .copy_bytes_per_s = 2.0 * bytes / copy_seconds};
}

ModelCost model_cost(const models::ModelShape& shape) {
  constexpr double kBytes = 2.0;  // of a bf16 number
  ModelCost cost;
  for (const Matrix& matrix : matrices_of(shape)) {
    cost.weight_numbers += static_cast<double>(matrix.count * matrix.out * matrix.in);
  }
  cost.weight_bytes = kBytes * cost.weight_numbers;
  const auto layers = static_cast<double>(shape.layers);
  cost.kv_bytes_per_token =
      2.0 * layers * static_cast<double>(shape.kv_heads * shape.head_dim) * kBytes;
  cost.attention_flops_per_pair = 4.0 * layers * static_cast<double>(shape.heads * shape.head_dim);
  return cost;
}

}  // namespace banyan::bench
