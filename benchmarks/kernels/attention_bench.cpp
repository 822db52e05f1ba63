// Attention on SmolLM2's heads (9 query, 3 kv, 64 wide) beside LibTorch's flash attention on the
// unshared batch. Trie arguments: groups, prompt tokens, responses per group, response tokens.
// Decode arguments: groups, responses per group, prompt tokens, position in the response.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include <vector>

#include "banyan/bench/workload.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/rope.h"
#include "banyan/ops/swiglu.h"
#include "banyan/ops/trie_attention.h"

namespace {

using namespace banyan;

constexpr int64_t kHeads = 9;
constexpr int64_t kKvHeads = 3;
constexpr int64_t kDim = 64;
constexpr double kScale = 0.125;
const ComputeOptions kNative;

at::Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kFloat).to(at::kBFloat16); }

trie::Trie groups(const benchmark::State& state) {
  std::vector<Sample> samples;
  for (int64_t group = 0; group < state.range(0); ++group) {
    for (int64_t s = 0; s < state.range(2); ++s) {
      Sample sample;
      sample.uid = static_cast<int64_t>(samples.size());
      sample.tokens.assign(state.range(1), static_cast<int32_t>(group));
      sample.tokens.resize(state.range(1) + state.range(3), static_cast<int32_t>(100 + s));
      samples.push_back(std::move(sample));
    }
  }
  return trie::build(samples);
}

struct Data {
  explicit Data(int64_t tokens)
      : q(random({tokens, kHeads, kDim})),
        k(random({tokens, kKvHeads, kDim})),
        v(random({tokens, kKvHeads, kDim})),
        grad(random({tokens, kHeads, kDim})) {}
  at::Tensor q, k, v, grad;
};

// Four flops per pair, head and dimension forward, ten backward (as a kernel without recomputation
// needs).
void count(benchmark::State& state, const trie::Trie& trie, double flops_per_pair) {
  const double flops = flops_per_pair * static_cast<double>(trie.num_pairs() * kHeads * kDim);
  state.counters["tokens"] = trie.num_tokens();
  state.counters["GFLOP/s"] =
      benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void trie_forward(benchmark::State& state) {
  const trie::Trie trie = groups(state);
  const Data data(trie.num_tokens());
  ops::TrieAttention attention(trie, kNative);
  at::Tensor lse;
  for (auto _ : state) {
    benchmark::DoNotOptimize(attention.forward(0, data.q, data.k, data.v, kScale, &lse));
  }
  count(state, trie, 4.0);
}

void trie_backward(benchmark::State& state) {
  const trie::Trie trie = groups(state);
  const Data data(trie.num_tokens());
  ops::TrieAttention attention(trie, kNative);
  at::Tensor lse;
  const at::Tensor out = attention.forward(0, data.q, data.k, data.v, kScale, &lse);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        attention.backward(0, data.grad, data.q, data.k, data.v, out, lse, kScale));
  }
  count(state, trie, 10.0);
}

// The presets of `banyan bench trie`, sharing on (1) and off (0): attention's share of what sharing
// is worth.
void preset(benchmark::State& state, const char* name, bool backward) {
  const std::vector<Sample> samples = bench::make_workload(name, /*vocab=*/49152, /*seed=*/1);
  const trie::Trie trie = trie::build(samples, {.share = state.range(0) != 0});
  const Data data(trie.num_tokens());
  ops::TrieAttention attention(trie, kNative);
  at::Tensor lse;
  const at::Tensor out = attention.forward(0, data.q, data.k, data.v, kScale, &lse);
  for (auto _ : state) {
    if (backward) {
      benchmark::DoNotOptimize(
          attention.backward(0, data.grad, data.q, data.k, data.v, out, lse, kScale));
    } else {
      benchmark::DoNotOptimize(attention.forward(0, data.q, data.k, data.v, kScale, &lse));
    }
  }
  count(state, trie, backward ? 10.0 : 4.0);
}

#define BANYAN_PRESET(name)                                                               \
  BENCHMARK_CAPTURE(preset, name##_forward, #name, false)->Arg(1)->Arg(0)->UseRealTime(); \
  BENCHMARK_CAPTURE(preset, name##_backward, #name, true)->Arg(1)->Arg(0)->UseRealTime()
BANYAN_PRESET(P512R512n8);
BANYAN_PRESET(P4kR256n16);
BANYAN_PRESET(turns10n8);
BANYAN_PRESET(fan512);
BENCHMARK_CAPTURE(preset, tree_forward, "tree-b2d6", false)->Arg(1)->Arg(0)->UseRealTime();
BENCHMARK_CAPTURE(preset, tree_backward, "tree-b2d6", true)->Arg(1)->Arg(0)->UseRealTime();
#undef BANYAN_PRESET

// The unshared batch, padded to one length, keys repeated, forward (and backward).
void flash(benchmark::State& state, bool backward) {
  const int64_t batch = state.range(0) * state.range(2);
  const int64_t length = state.range(1) + state.range(3);
  const at::Tensor q = random({batch, kHeads, length, kDim});
  const at::Tensor k = random({batch, kHeads, length, kDim});
  const at::Tensor v = random({batch, kHeads, length, kDim});
  const auto [out, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true, {}, kScale);
  for (auto _ : state) {
    if (backward) {
      benchmark::DoNotOptimize(at::_scaled_dot_product_flash_attention_for_cpu_backward(
          q, q, k, v, out, lse, 0.0, true, {}, kScale));
    } else {
      benchmark::DoNotOptimize(
          at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true, {}, kScale));
    }
  }
}

void flash_forward(benchmark::State& state) { flash(state, false); }
void flash_backward(benchmark::State& state) { flash(state, true); }

void decode(benchmark::State& state) {
  const int64_t page = ops::kPathTile;
  const int64_t prompt = state.range(2);
  const int64_t length = prompt + state.range(3);
  const int64_t shared = prompt / page;
  const int64_t own = (length + page - 1) / page - shared;
  const int64_t batch = state.range(0) * state.range(1);
  ops::KvPool pool(1, kKvHeads, kDim, state.range(0) * shared + batch * own, kNative);
  pool.layer(0).normal_();
  std::vector<ops::PagedRun> runs;
  int32_t next = 0;
  for (int64_t group = 0; group < state.range(0); ++group) {
    std::vector<int32_t> trunk;
    for (int64_t i = 0; i < shared; ++i) trunk.push_back(next++);
    for (int64_t s = 0; s < state.range(1); ++s) {
      ops::PagedRun run{1, static_cast<int32_t>(length - 1), trunk};
      for (int64_t i = 0; i < own; ++i) run.pages.push_back(next++);
      runs.push_back(std::move(run));
    }
  }
  const Data data(batch);
  ops::PagedAttention attention(pool, runs);
  for (auto _ : state) {
    benchmark::DoNotOptimize(attention.forward(0, data.q, data.k, data.v, kScale, nullptr));
  }
  state.counters["sequences"] = static_cast<double>(batch);
}

void prefill(benchmark::State& state) {
  const int64_t length = state.range(0);
  ops::KvPool pool(1, kKvHeads, kDim, (length + 63) / 64, kNative);
  ops::PagedRun run{static_cast<int32_t>(length), 0, {}};
  for (int64_t i = 0; i < pool.num_pages(); ++i) run.pages.push_back(static_cast<int32_t>(i));
  const Data data(length);
  ops::PagedAttention attention(pool, {run});
  for (auto _ : state) {
    benchmark::DoNotOptimize(attention.forward(0, data.q, data.k, data.v, kScale, nullptr));
  }
}

// The elementwise ops on [rows, 576] and [rows, 2 * 1536].
void elementwise(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const at::Tensor x = random({rows, 576});
  const at::Tensor weight = random({576});
  const at::Tensor gate_up = random({rows, 2 * 1536});
  const at::Tensor up = random({rows, 1536});
  const at::Tensor q = random({rows, kHeads, kDim});
  const at::Tensor positions = at::randn({rows}).abs().mul(100.0).to(at::kInt);
  const at::Tensor table = at::randn({8192, kDim / 2});
  at::Tensor grad_weight = at::randn({576});
  for (auto _ : state) {
    switch (state.range(1)) {
      case 0:
        benchmark::DoNotOptimize(ops::rms_norm_forward(x, weight, 1e-5, kNative));
        break;
      case 1:
        benchmark::DoNotOptimize(ops::rms_norm_backward(x, x, weight, 1e-5, grad_weight, kNative));
        break;
      case 2:
        benchmark::DoNotOptimize(ops::rope_forward(q, positions, table, table, kNative));
        break;
      case 3:
        benchmark::DoNotOptimize(ops::swiglu_forward(gate_up, kNative));
        break;
      default:
        benchmark::DoNotOptimize(ops::swiglu_backward(up, gate_up, kNative));
    }
  }
  static const char* const kNames[] = {"rms_norm", "rms_norm_bwd", "rope", "swiglu", "swiglu_bwd"};
  state.SetLabel(kNames[state.range(1)]);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->Args({8, 100, 8, 128})
      ->Args({8, 170, 8, 24})
      ->Args({2, 1024, 8, 256})
      ->Args({64, 100, 1, 128});
  b->Unit(benchmark::kMillisecond)->UseRealTime();
}
BENCHMARK(trie_forward)->Apply(shapes);
BENCHMARK(trie_backward)->Apply(shapes);
BENCHMARK(flash_forward)->Apply(shapes);
BENCHMARK(flash_backward)->Apply(shapes);
BENCHMARK(decode)
    ->Args({8, 8, 100, 64})
    ->Args({64, 1, 100, 64})
    ->Args({32, 8, 170, 24})
    ->Args({1, 1, 100, 64})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();
BENCHMARK(prefill)->Arg(200)->Arg(2048)->Unit(benchmark::kMicrosecond)->UseRealTime();
BENCHMARK(elementwise)
    ->ArgsProduct({{64, 9000}, {0, 1, 2, 3, 4}})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

}  // namespace
