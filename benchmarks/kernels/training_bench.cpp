// Every kernel of the training step on SmolLM2's shapes, each against the machine's limit
// (limits.h). Rows: 1,024 is a block of one GSM8K group, 8,192 a large block.
// `make bench-kernels` runs it and writes benchmarks/results/kernels.md.
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <vector>

#include "banyan/bench/workload.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/ops/linear.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/rope.h"
#include "banyan/ops/swiglu.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/optim/adamw.h"
#include "limits.h"

namespace {

using namespace banyan;

constexpr int64_t kHidden = 576;
constexpr int64_t kIntermediate = 1536;
constexpr int64_t kVocabulary = 49152;
constexpr int64_t kHeads = 9;
constexpr int64_t kKvHeads = 3;
constexpr int64_t kDim = 64;
constexpr double kEps = 1e-5;
constexpr int64_t kOptimized = int64_t{32} << 20;  // weights: beyond any cache
const ComputeOptions kNative;

at::Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kFloat).to(at::kBFloat16); }

at::Tensor wide(at::IntArrayRef sizes) { return at::zeros(sizes, at::kFloat); }

// --- attention over a trie ----------------------------------------------------------------------
struct TrieData {
  explicit TrieData(const std::string& preset)
      : trie(trie::build(bench::make_workload(preset, kVocabulary, /*seed=*/1))),
        attention(trie, kNative) {
    const int64_t tokens = trie.num_tokens();
    q = random({tokens, kHeads, kDim});
    k = random({tokens, kKvHeads, kDim});
    v = random({tokens, kKvHeads, kDim});
    grad = random({tokens, kHeads, kDim});
    out = attention.forward(0, q, k, v, kScale, &lse);
  }
  static constexpr double kScale = 0.125;
  trie::Trie trie;
  ops::TrieAttention attention;
  at::Tensor q, k, v, grad, out, lse;
};

void attention_forward(benchmark::State& state, const char* preset) {
  TrieData x(preset);
  run(state, [&] {
    benchmark::DoNotOptimize(x.attention.forward(0, x.q, x.k, x.v, TrieData::kScale, &x.lse));
  });
}

void attention_backward(benchmark::State& state, const char* preset) {
  TrieData x(preset);
  run(state, [&] {
    benchmark::DoNotOptimize(
        x.attention.backward(0, x.grad, x.q, x.k, x.v, x.out, x.lse, TrieData::kScale));
  });
}

// --- the head -----------------------------------------------------------------------------------
struct HeadData {
  explicit HeadData(int64_t rows) {
    ops::pack_weight(at::randn({kVocabulary, kHidden}, at::kFloat).mul_(0.05),
                     kNative,
                     /*with_backward=*/true,
                     weight);
    hidden = random({rows, kHidden});
    index.row_offsets = at::arange(rows + 1, at::kInt);
    index.token = at::randint(0, kVocabulary, {rows}, at::kInt);
    gradient = at::randn({rows}, at::kFloat);
  }
  ops::EdgeLogprob forward() const {
    return ops::edge_logprob_forward(hidden, weight, index, 1.0, /*with_entropy=*/true, kNative);
  }
  ops::LinearWeight weight;
  ops::EdgeIndex index;
  at::Tensor hidden, gradient;
};

void edge_logprob_forward(benchmark::State& state) {
  const HeadData x(state.range(0));
  run(state, [&] { benchmark::DoNotOptimize(x.forward()); });
}

void edge_logprob_backward(benchmark::State& state) {
  const HeadData x(state.range(0));
  const ops::EdgeLogprob forward = x.forward();
  at::Tensor grad = wide({kVocabulary, kHidden});
  run(state, [&] {
    benchmark::DoNotOptimize(ops::edge_logprob_backward(
        x.hidden, x.weight, x.index, forward, x.gradient, at::Tensor(), 1.0, grad, kNative));
  });
}

// --- products -----------------------------------------------------------------------------------
struct LinearData {
  explicit LinearData(const benchmark::State& state)
      : rows(state.range(0)), out(state.range(1)), in(state.range(2)) {
    ops::pack_weight(at::randn({out, in}, at::kFloat), kNative, /*with_backward=*/true, weight);
    x = random({rows, in});
    dy = random({rows, out});
  }
  int64_t rows, out, in;
  ops::LinearWeight weight;
  at::Tensor x, dy;
};

void linear_forward(benchmark::State& state) {
  const LinearData x(state);
  run(state, [&] { benchmark::DoNotOptimize(ops::linear_forward(x.x, x.weight, {})); });
}

void linear_dgrad(benchmark::State& state) {
  const LinearData x(state);
  run(state, [&] { benchmark::DoNotOptimize(ops::linear_backward_input(x.dy, x.weight)); });
}

void linear_wgrad(benchmark::State& state) {
  const LinearData x(state);
  at::Tensor grad = wide({x.out, x.in});
  run(state, [&] { ops::linear_backward_weight(x.dy, x.x, grad, {}, kNative); });
}

// --- elementwise --------------------------------------------------------------------------------
void rms_norm_forward(benchmark::State& state) {
  const at::Tensor x = random({state.range(0), kHidden});
  const at::Tensor weight = random({kHidden});
  run(state, [&] { benchmark::DoNotOptimize(ops::rms_norm_forward(x, weight, kEps, kNative)); });
}

void rms_norm_backward(benchmark::State& state) {
  const at::Tensor x = random({state.range(0), kHidden});
  const at::Tensor dy = random({state.range(0), kHidden});
  const at::Tensor weight = random({kHidden});
  at::Tensor grad = wide({kHidden});
  run(state, [&] {
    benchmark::DoNotOptimize(ops::rms_norm_backward(dy, x, weight, kEps, grad, kNative));
  });
}

void rope(benchmark::State& state) {
  const at::Tensor q = random({state.range(0), kHeads, kDim});
  const at::Tensor positions = at::randint(0, 4096, {state.range(0)}, at::kInt);
  const at::Tensor table = at::randn({4096, kDim / 2}, at::kFloat);
  run(state,
      [&] { benchmark::DoNotOptimize(ops::rope_forward(q, positions, table, table, kNative)); });
}

void swiglu_forward(benchmark::State& state) {
  const at::Tensor gate_up = random({state.range(0), 2 * kIntermediate});
  run(state, [&] { benchmark::DoNotOptimize(ops::swiglu_forward(gate_up, kNative)); });
}

void swiglu_backward(benchmark::State& state) {
  const at::Tensor gate_up = random({state.range(0), 2 * kIntermediate});
  const at::Tensor dy = random({state.range(0), kIntermediate});
  run(state, [&] { benchmark::DoNotOptimize(ops::swiglu_backward(dy, gate_up, kNative)); });
}

void embedding_forward(benchmark::State& state) {
  ops::LinearWeight weight;
  ops::pack_weight(at::randn({kVocabulary, kHidden}, at::kFloat), kNative, true, weight);
  const at::Tensor ids = at::randint(0, kVocabulary, {state.range(0)}, at::kInt);
  run(state, [&] { benchmark::DoNotOptimize(ops::embedding_forward(ids, weight)); });
}

void embedding_backward(benchmark::State& state) {
  const at::Tensor ids = at::randint(0, kVocabulary, {state.range(0)}, at::kInt);
  const at::Tensor dy = random({state.range(0), kHidden});
  at::Tensor grad = wide({kVocabulary, kHidden});
  run(state, [&] { ops::embedding_backward(dy, ids, grad); });
}

// --- optimizer ----------------------------------------------------------------------------------
struct Weights {
  Weights() {
    table.add("weight", at::randn({kOptimized / kHidden, kHidden}, at::kFloat));
    table.ensure_grads();
    table.params()[0].grad.normal_();
  }
  ParamTable table;
};

void adamw(benchmark::State& state) {
  Weights x;
  optim::AdamW optimizer(x.table, {});
  run(state, [&] { optimizer.step(/*lr=*/1e-6, /*grad_scale=*/1.0); });
}

void gradient_norm(benchmark::State& state) {
  const Weights x;
  run(state, [&] { benchmark::DoNotOptimize(optim::grad_norm(x.table)); });
}

void repack(benchmark::State& state) {
  const at::Tensor master = at::randn({kVocabulary, kHidden}, at::kFloat);
  ops::LinearWeight weight;
  ParamTable table;
  table.add("weight", master);
  table.on_repack([&] { ops::pack_weight(master, kNative, /*with_backward=*/true, weight); });
  run(state, [&] { table.repack(); });
}

// A scope of the profile while it is off: what every op pays for being measurable.
void profile_scope_off(benchmark::State& state) {
  for (auto _ : state) {
    const profile::Scope timed("op", [&] { return profile::Work{.flops = state.iterations()}; });
    benchmark::ClobberMemory();
  }
}

void rows(benchmark::internal::Benchmark* bench) {
  bench->Arg(1024)->Arg(8192)->UseRealTime()->Unit(benchmark::kMicrosecond);
}

void products(benchmark::internal::Benchmark* bench) {
  for (const int64_t num_rows : {1024, 8192}) {
    bench->Args({num_rows, (kHeads + 2 * kKvHeads) * kDim, kHidden})
        ->Args({num_rows, kHidden, kHeads * kDim})
        ->Args({num_rows, 2 * kIntermediate, kHidden})
        ->Args({num_rows, kHidden, kIntermediate});
  }
  bench->UseRealTime()->Unit(benchmark::kMicrosecond);
}

void once(benchmark::internal::Benchmark* bench) {
  bench->UseRealTime()->Unit(benchmark::kMicrosecond);
}

#define BANYAN_ATTENTION(name)                                    \
  BENCHMARK_CAPTURE(attention_forward, name, #name)->Apply(once); \
  BENCHMARK_CAPTURE(attention_backward, name, #name)->Apply(once)
BANYAN_ATTENTION(P100R128n8);
BANYAN_ATTENTION(P512R512n8);
BANYAN_ATTENTION(P4kR256n16);
BANYAN_ATTENTION(turns10n8);
#undef BANYAN_ATTENTION
BENCHMARK(edge_logprob_forward)->Apply(rows);
BENCHMARK(edge_logprob_backward)->Apply(rows);
BENCHMARK(linear_forward)->Apply(products);
BENCHMARK(linear_dgrad)->Apply(products);
BENCHMARK(linear_wgrad)->Apply(products);
BENCHMARK(rms_norm_forward)->Apply(rows);
BENCHMARK(rms_norm_backward)->Apply(rows);
BENCHMARK(rope)->Apply(rows);
BENCHMARK(swiglu_forward)->Apply(rows);
BENCHMARK(swiglu_backward)->Apply(rows);
BENCHMARK(embedding_forward)->Apply(rows);
BENCHMARK(embedding_backward)->Apply(rows);
BENCHMARK(adamw)->Apply(once);
BENCHMARK(gradient_norm)->Apply(once);
BENCHMARK(repack)->Apply(once);
BENCHMARK(profile_scope_off);

}  // namespace
