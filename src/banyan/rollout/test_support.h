// A small random decoder, prompts and a checked generate call, for the tests of this folder.
#pragma once

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "banyan/ops/edge_logprob.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/rollout/engine.h"
#include "banyan/trie/plan.h"

namespace banyan::rollout {

inline constexpr int32_t kVocab = 300;

inline constexpr const char* kTinyConfig =
    R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024,
        "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.15})";

inline std::unique_ptr<models::CausalLM> tiny_model(const ComputeOptions& compute = {}) {
  return models::random_model(
      kTinyConfig, /*seed=*/3, {.compute = compute, .with_backward = false});
}

inline models::CausalLM& shared_model() {
  static const std::unique_ptr<models::CausalLM> model = tiny_model();
  return *model;
}

// Prompts that open with one trunk of `trunk` tokens, then differ; lengths around the page size.
inline std::vector<Prompt> make_prompts(int32_t count, int32_t trunk, int32_t n) {
  std::mt19937 random(17);
  const auto token = [&] { return static_cast<int32_t>(random() % kVocab); };
  std::vector<int32_t> opening(trunk);
  for (int32_t& id : opening) id = token();
  std::vector<Prompt> prompts;
  for (int32_t i = 0; i < count; ++i) {
    Prompt& prompt = prompts.emplace_back();
    prompt.row = 100 + i;
    prompt.n = n;
    prompt.tokens = opening;
    for (int32_t t = 0; t < 5 + 11 * i; ++t) prompt.tokens.push_back(token());
  }
  return prompts;
}

inline SamplingParams make_params(int32_t max_tokens) {
  SamplingParams params;
  params.max_tokens = max_tokens;
  params.eos_ids = {7, 8, 9};
  params.seed = 5;
  params.step = 2;
  return params;
}

using Key = std::pair<int64_t, int32_t>;
struct Result {
  std::map<Key, Trajectory> trajectories;
  GenerateStats stats;
};

// What one generate call of an engine hands over, checked.
inline Result generate(Engine& engine,
                       const std::vector<Prompt>& prompts,
                       const SamplingParams& params,
                       const std::function<bool()>& should_stop = nullptr) {
  Result result;
  result.stats = engine.generate(
      prompts,
      params,
      [&](Trajectory&& t) {
        const Key key{t.row, t.index};
        EXPECT_TRUE(result.trajectories.emplace(key, std::move(t)).second) << "twice";
      },
      should_stop);
  for (const auto& [key, t] : result.trajectories) {
    EXPECT_EQ(t.rollout_log_probs.size(), t.response.size());
    EXPECT_EQ(t.response_mask, std::vector<uint8_t>(t.response.size(), 1));
    for (const float logprob : t.rollout_log_probs) {
      EXPECT_TRUE(std::isfinite(logprob) && logprob <= 0.0f);
    }
  }
  return result;
}

// The same of an engine of its own.
inline Result generate(models::CausalLM& model,
                       const std::vector<Prompt>& prompts,
                       const SamplingParams& params,
                       const EngineOptions& options = {},
                       const std::function<bool()>& should_stop = nullptr) {
  Engine engine(model, options);
  return generate(engine, prompts, params, should_stop);
}

inline void expect_same(const Result& got, const Result& wanted, const std::string& what) {
  for (const auto& [key, trajectory] : got.trajectories) {
    const auto found = wanted.trajectories.find(key);
    ASSERT_NE(found, wanted.trajectories.end());
    EXPECT_EQ(trajectory.response, found->second.response) << what;
    EXPECT_EQ(trajectory.rollout_log_probs, found->second.rollout_log_probs) << what;
    EXPECT_EQ(trajectory.finish, found->second.finish) << what;
  }
}

inline at::Tensor ints(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

// Prompt and response of each, in the order of the keys; the response is scored.
inline std::vector<Sample> samples_of(const Result& result) {
  std::vector<Sample> samples;
  for (const auto& [key, t] : result.trajectories) {
    Sample& sample = samples.emplace_back();
    sample.uid = static_cast<int64_t>(samples.size());
    sample.tokens = t.prompt;
    sample.tokens.insert(sample.tokens.end(), t.response.begin(), t.response.end());
    sample.scored.assign(t.prompt.size(), 0);
    sample.scored.resize(sample.tokens.size(), 1);
  }
  return samples;
}

// log_softmax(z / T) of every response token by a forward over the trie of all trajectories.
inline std::map<Key, std::vector<float>> score(models::CausalLM& model,
                                               const Result& result,
                                               double temperature) {
  const std::vector<Sample> samples = samples_of(result);
  const trie::Trie trie = trie::build(samples);
  trie::LogicalTokens logical;
  const trie::Edges edges = trie::edges_of(trie, samples, &logical);
  ops::TrieAttention attention(trie, model.options());
  const at::Tensor hidden = model.forward(ints(trie.tok), ints(trie.pos), attention, nullptr);
  const ops::EdgeLogprob scored = ops::edge_logprob_forward(
      hidden.index_select(0, ints(edges.source)),
      model.head(),
      {.row_offsets = ints(edges.row_offsets), .token = ints(edges.token)},
      temperature,
      /*with_entropy=*/false,
      model.options());
  std::map<Key, std::vector<float>> out;
  size_t s = 0;
  for (const auto& [key, t] : result.trajectories) {
    for (int32_t u = logical.offsets[s]; u < logical.offsets[s + 1]; ++u) {
      out[key].push_back(scored.logprob.to(at::kFloat)[logical.edge[u]].item<float>());
    }
    ++s;
  }
  return out;
}

}  // namespace banyan::rollout
