// The vocabulary head of SmolLM2 (E = 576, V = 49152). Arguments: rows. The figure counts one
// product for the forward and three for the backward (logits again, dH, dW).
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include "banyan/ops/edge_logprob.h"

namespace {

constexpr int64_t kWidth = 576;
constexpr int64_t kVocabulary = 49152;
const banyan::ComputeOptions kNative;

struct Head {
  explicit Head(const benchmark::State& state) : rows(state.range(0)) {
    const at::Tensor master = at::randn({kVocabulary, kWidth}, at::kFloat).mul_(0.05);
    banyan::ops::pack_weight(master, kNative, /*with_backward=*/true, weight);
    hidden = at::randn({rows, kWidth}, at::kFloat).to(at::kBFloat16);
    index.row_offsets = at::arange(rows + 1, at::kInt);
    index.token = at::randint(0, kVocabulary, {rows}, at::kInt);
    gradient = at::randn({rows}, at::kFloat);
  }

  void count(benchmark::State& state, double products) const {
    const double flops = products * 2.0 * static_cast<double>(rows * kWidth * kVocabulary);
    state.counters["GFLOP/s"] =
        benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  }

  int64_t rows;
  banyan::ops::LinearWeight weight;
  banyan::ops::EdgeIndex index;
  at::Tensor hidden, gradient;
};

void forward(benchmark::State& state) {
  const Head head(state);
  const bool with_entropy = state.range(1) != 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(banyan::ops::edge_logprob_forward(
        head.hidden, head.weight, head.index, 1.0, with_entropy, kNative));
  }
  head.count(state, 1.0);
}

void backward(benchmark::State& state) {
  const Head head(state);
  const bool with_entropy = state.range(1) != 0;
  const auto forward = banyan::ops::edge_logprob_forward(
      head.hidden, head.weight, head.index, 1.0, with_entropy, kNative);
  at::Tensor grad = at::zeros({kVocabulary, kWidth}, at::kFloat);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        banyan::ops::edge_logprob_backward(head.hidden,
                                           head.weight,
                                           head.index,
                                           forward,
                                           head.gradient,
                                           with_entropy ? head.gradient : at::Tensor(),
                                           1.0,
                                           grad,
                                           kNative));
  }
  head.count(state, 3.0);
}

void logits(benchmark::State& state) {
  const Head head(state);
  for (auto _ : state) {
    benchmark::DoNotOptimize(banyan::ops::head_logits(head.hidden, head.weight, kNative));
  }
  head.count(state, 1.0);
}

void sampled_logprob(benchmark::State& state) {
  const Head head(state);
  const at::Tensor z = banyan::ops::head_logits(head.hidden, head.weight, kNative);
  for (auto _ : state) {
    benchmark::DoNotOptimize(banyan::ops::logits_logprob(z, head.index.token, 1.0, kNative));
  }
}

void shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t rows : {64, 1024, 1400}) bench->Args({rows, 0})->Args({rows, 1});
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(forward)->Apply(shapes);
BENCHMARK(backward)->Apply(shapes);
BENCHMARK(logits)->Arg(1)->Arg(64)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(sampled_logprob)->Arg(1)->Arg(64)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
