// One row of logits drawn under one set of parameters, a single thread: microseconds per token, for
// vocabularies of 49,152 (SmolLM2) and 151,936 (Qwen). The logits are as peaked as a trained
// model's: a normal spread of 2.5 and a few hundred that stand out.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "banyan/rollout/sampling/row_sampler.h"

namespace {

using namespace banyan::rollout;

std::vector<float> make_logits(int32_t vocab) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  std::vector<float> z(vocab);
  for (float& value : z) value = normal(random);
  for (int32_t i = 0; i < 300; ++i) z[random() % vocab] += 12.0f * static_cast<float>(i) / 300.0f;
  return z;
}

using Change = void (*)(SamplingParams&);

void draw(benchmark::State& state, Change change) {
  const auto vocab = static_cast<int32_t>(state.range(0));
  std::vector<float> z = make_logits(vocab);
  SamplingParams params;
  params.max_tokens = 1 << 20;
  change(params);
  const std::vector<std::string> no_bytes;
  const SamplingPlan plan(params, {1, 2, 3}, 0, no_bytes);
  ResponseState response(plan);
  for (int32_t i = 0; i < 500; ++i) response.append(i * 37 % vocab);
  RowSampler sampler(vocab);
  Drawn drawn;
  float u = 0.0f;
  for (auto _ : state) {
    sampler.load(z.data());
    sampler.draw(response, u, /*with_raw=*/true, drawn);
    u = u > 0.98f ? 0.0f : u + 0.01f;
    benchmark::DoNotOptimize(drawn.record.token);
  }
}

#define BANYAN_DRAW(name, ...)                                          \
  BENCHMARK_CAPTURE(draw, name, [](SamplingParams& p) { __VA_ARGS__; }) \
      ->Arg(49152)                                                      \
      ->Arg(151936)                                                     \
      ->Unit(benchmark::kMicrosecond)

BANYAN_DRAW(plain, (void)p);
BANYAN_DRAW(greedy, p.temperature = 0.0);
BANYAN_DRAW(temperature, p.temperature = 0.7);
BANYAN_DRAW(top_k_50, p.top_k = 50);
BANYAN_DRAW(top_k_1024, p.top_k = 1024);
BANYAN_DRAW(top_p_95, p.top_p = 0.95);
BANYAN_DRAW(min_p_05, p.min_p = 0.05);
BANYAN_DRAW(top_k_20_top_p_80_temperature, p.top_k = 20; p.top_p = 0.8; p.temperature = 0.7);
BANYAN_DRAW(penalties_500_tokens, p.repetition_penalty = 1.1; p.frequency_penalty = 0.2);
BANYAN_DRAW(top_logprobs_5, p.top_logprobs = 5);
BANYAN_DRAW(allowed_1000, for (int32_t i = 0; i < 1000; ++i) p.allowed_token_ids.push_back(i * 40));

}  // namespace
