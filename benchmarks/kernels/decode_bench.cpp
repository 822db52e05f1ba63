// The rollout's pass at decode widths on SmolLM2-135M's shapes (random weights), with the share of
// what the machine allows (rollout specification, section 7):
//   limit = max((weights + KV bytes) / BW, (2 P B + 4 B ctx L H d) / F)
// with BW and F measured here at start (bench/machine_rates.h). `of_limit` = limit / time.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "banyan/bench/machine_rates.h"
#include "banyan/models/causal_lm.h"
#include "banyan/rollout/sampling/plain_draw.h"

namespace {

using banyan::models::CausalLM;
namespace bench = banyan::bench;
namespace ops = banyan::ops;

constexpr int32_t kPageTokens = static_cast<int32_t>(ops::kPathTile);

CausalLM& model() {
  static const std::unique_ptr<CausalLM> made = banyan::models::random_model(
      R"({"model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
          "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
          "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000,
          "max_position_embeddings": 8192, "tie_word_embeddings": true,
          "initializer_range": 0.04})",
      1,
      {.compute = {}, .with_backward = false});
  return *made;
}

// `groups` prompts of `trunk` tokens (whole pages) with `siblings` responses each.
class Decoding {
 public:
  Decoding(int32_t groups, int32_t siblings, int32_t trunk, int32_t suffix)
      : siblings_(siblings),
        trunk_pages_(trunk / kPageTokens),
        own_pages_(suffix / kPageTokens + 2),
        position_(trunk + suffix),
        num_seqs_(groups * siblings) {
    const auto& shape = model().shape();
    const int64_t pages = groups * trunk_pages_ + int64_t{num_seqs_} * own_pages_;
    pool_ = std::make_unique<ops::KvPool>(
        shape.layers, shape.kv_heads, shape.head_dim, pages, model().options());
    for (int64_t layer = 0; layer < shape.layers; ++layer) pool_->layer(layer).normal_();
  }

  // One pass and its draws.
  void step(bool grouped, bool with_head) {
    batch_.clear();
    batch_.set_grouped(grouped);
    for (int32_t s = 0; s < num_seqs_; ++s) {
      ops::PagedRun& run = batch_.add_run();
      run.num_tokens = 1;
      run.first_position = position_;
      const int32_t group = s / siblings_;
      for (int32_t p = 0; p < trunk_pages_; ++p) run.pages.push_back(group * trunk_pages_ + p);
      const int32_t own = num_seqs_ / siblings_ * trunk_pages_ + s * own_pages_;
      for (int32_t p = 0; p < own_pages_; ++p) run.pages.push_back(own + p);
      batch_.ids().push_back((s * 37 + step_ * 11) % 49152);
      batch_.want(s);
    }
    batch_.finish(pool_->num_pages(), model().shape().vocab);
    const at::Tensor hidden = model().infer(*pool_, batch_);
    ++step_;
    if (!with_head) return;
    draws_.clear();
    for (int32_t s = 0; s < num_seqs_; ++s) {
      draws_.push_back({.row = s, .uniform = static_cast<float>((s * 7 + step_) % 97) / 97.0f});
    }
    drawer_.draw(hidden, model().head(), draws_, false, drawn_);
  }

  // Seconds that the machine needs at least, for the pass alone or with the head.
  double limit(const bench::MachineRates& rates, bool with_head) const {
    const auto& shape = model().shape();
    const bench::ModelCost cost = bench::model_cost(shape);
    const double head = with_head ? 0.0 : double(shape.vocab * shape.hidden);
    const double numbers = cost.weight_numbers - head;
    const double trunk = double(trunk_pages_) * kPageTokens;
    const double own = num_seqs_ * (position_ + 1 - trunk);
    const double cached = double(num_seqs_ / siblings_) * trunk + own;
    const double bytes = 2.0 * numbers + cost.kv_bytes_per_token * cached;
    const double flops =
        2.0 * numbers * num_seqs_ + cost.attention_flops_per_pair * num_seqs_ * (position_ + 1);
    return std::max(bytes / rates.bytes_per_s, flops / rates.flops_per_s);
  }

  int32_t num_seqs() const { return num_seqs_; }

 private:
  int32_t siblings_;
  int32_t trunk_pages_;
  int32_t own_pages_;
  int32_t position_;
  int32_t num_seqs_;
  int32_t step_ = 0;
  std::unique_ptr<ops::KvPool> pool_;
  ops::PagedBatch batch_;
  std::vector<banyan::rollout::PlainDraw> draws_;
  std::vector<banyan::rollout::PlainDrawn> drawn_;
  banyan::rollout::PlainDrawer drawer_;
};

const bench::MachineRates& rates() {
  static const bench::MachineRates measured =
      bench::measure_rates(model().shape(), model().options());
  return measured;
}

void count(benchmark::State& state, const Decoding& decoding, bool with_head) {
  const double limit = decoding.limit(rates(), with_head);
  state.counters["tokens/s"] =
      benchmark::Counter(decoding.num_seqs(), benchmark::Counter::kIsIterationInvariantRate);
  state.counters["of_limit"] =
      benchmark::Counter(limit, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] = rates().bytes_per_s * 1e-9;
  state.counters["GFLOP/s"] = rates().flops_per_s * 1e-9;
}

// Arguments: prompts, siblings, trunk, own tokens.
void decode(benchmark::State& state) {
  Decoding decoding(state.range(0), state.range(1), state.range(2), state.range(3));
  decoding.step(true, true);
  for (auto _ : state) decoding.step(/*grouped=*/true, /*with_head=*/true);
  count(state, decoding, true);
}

void decode_ungrouped(benchmark::State& state) {
  Decoding decoding(state.range(0), state.range(1), state.range(2), state.range(3));
  decoding.step(false, true);
  for (auto _ : state) decoding.step(/*grouped=*/false, /*with_head=*/true);
  count(state, decoding, true);
}

void decode_body(benchmark::State& state) {
  Decoding decoding(state.range(0), state.range(1), state.range(2), state.range(3));
  decoding.step(true, false);
  for (auto _ : state) decoding.step(/*grouped=*/true, /*with_head=*/false);
  count(state, decoding, false);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->Args({1, 1, 64, 64})->Args({2, 4, 64, 64})->Args({8, 8, 64, 64})->Args({16, 8, 64, 64});
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

void trunks(benchmark::internal::Benchmark* bench) {
  bench->Args({1, 32, 2048, 64})->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(decode)->Apply(shapes)->Apply(trunks);
BENCHMARK(decode_body)->Apply(shapes);
BENCHMARK(decode_ungrouped)->Apply(trunks);

}  // namespace
