// Packed bf16 products on SmolLM2's shapes beside at::mm. Arguments: rows, in, out.
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include "banyan/ops/linear.h"

namespace {

using banyan::ops::LinearWeight;

const banyan::ComputeOptions kNative;

struct Operands {
  explicit Operands(const benchmark::State& state)
      : rows(state.range(0)), in(state.range(1)), out(state.range(2)) {
    master = at::randn({out, in}, at::kFloat);
    banyan::ops::pack_weight(master, kNative, /*with_backward=*/true, weight);
    x = at::randn({rows, in}, at::kFloat).to(at::kBFloat16);
    dy = at::randn({rows, out}, at::kFloat).to(at::kBFloat16);
  }

  void count(benchmark::State& state) const {
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(in * out);
    state.counters["GFLOP/s"] =
        benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  }

  int64_t rows, in, out;
  at::Tensor master, x, dy;
  LinearWeight weight;
};

void forward(benchmark::State& state) {
  const Operands data(state);
  for (auto _ : state)
    benchmark::DoNotOptimize(banyan::ops::linear_forward(data.x, data.weight, {}));
  data.count(state);
}

void forward_at_mm(benchmark::State& state) {
  const Operands data(state);
  const at::Tensor weight_t = data.master.to(at::kBFloat16).t();
  for (auto _ : state) benchmark::DoNotOptimize(at::mm(data.x, weight_t));
  data.count(state);
}

void backward_input(benchmark::State& state) {
  const Operands data(state);
  for (auto _ : state)
    benchmark::DoNotOptimize(banyan::ops::linear_backward_input(data.dy, data.weight));
  data.count(state);
}

void backward_weight(benchmark::State& state) {
  const Operands data(state);
  at::Tensor grad = at::zeros({data.out, data.in}, at::kFloat);
  for (auto _ : state) banyan::ops::linear_backward_weight(data.dy, data.x, grad, {}, kNative);
  data.count(state);
}

void backward_weight_at_mm(benchmark::State& state) {
  const Operands data(state);
  for (auto _ : state) benchmark::DoNotOptimize(at::mm(data.dy.t(), data.x));
  data.count(state);
}

void pack(benchmark::State& state) {
  Operands data(state);
  for (auto _ : state)
    banyan::ops::pack_weight(data.master, kNative, /*with_backward=*/true, data.weight);
  state.SetBytesProcessed(state.iterations() * data.in * data.out * 8);
}

void body_shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t rows : {1, 16, 64, 128, 512, 2048}) {
    bench->Args({rows, 576, 576})
        ->Args({rows, 576, 960})
        ->Args({rows, 576, 3072})
        ->Args({rows, 1536, 576});
  }
  bench->UseRealTime()->Unit(benchmark::kMicrosecond);
}

void training_shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t rows : {512, 2048}) {
    bench->Args({rows, 576, 960})
        ->Args({rows, 576, 1536})
        ->Args({rows, 576, 3072})
        ->Args({rows, 1536, 576});
  }
  bench->UseRealTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK(forward)->Apply(body_shapes)->Args({64, 576, 49152})->Args({512, 576, 49152});
BENCHMARK(forward_at_mm)->Apply(body_shapes)->Args({64, 576, 49152})->Args({512, 576, 49152});
BENCHMARK(backward_input)->Apply(training_shapes);
BENCHMARK(backward_weight)->Apply(training_shapes);
BENCHMARK(backward_weight_at_mm)->Apply(training_shapes);
BENCHMARK(pack)
    ->Args({1, 576, 3072})
    ->Args({1, 576, 49152})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
