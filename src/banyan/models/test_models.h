// Tiny configurations of every architecture, and one scored pass over a trie, for the tests of
// models/.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/trie/plan.h"

namespace banyan::models {

inline std::string tiny_config(const std::string& model_type, const std::string& extra) {
  return R"({"model_type": ")" + model_type +
         R"(", "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "initializer_range": 0.3)" +
         extra + "}";
}

// Two layers with experts; the toy samples reach all of them.
inline std::string tiny_moe_config(const std::string& extra = "") {
  return tiny_config("qwen3_moe",
                     R"(, "head_dim": 24, "rope_theta": 1e6, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": true)" +
                         extra);
}

// {name, config.json}: biases, q/k norm, tied and untied, experts, every kind of RoPE scale.
inline std::vector<std::pair<std::string, std::string>> tiny_configs() {
  return {
      {"llama_tied", tiny_config("llama", R"(, "tie_word_embeddings": true, "rope_theta": 1e5)")},
      {"llama_biased", tiny_config("llama", R"(, "attention_bias": true, "mlp_bias": true)")},
      {"llama_yarn",
       tiny_config(
           "llama",
           R"(, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})")},
      {"qwen2_tied", tiny_config("qwen2", R"(, "tie_word_embeddings": true, "rope_theta": 1e6)")},
      {"qwen3", tiny_config("qwen3", R"(, "head_dim": 24, "rope_theta": 1e6)")},
      {"qwen3_moe", tiny_moe_config()},
  };
}

inline std::vector<Sample> samples_of(const std::vector<std::vector<int32_t>>& tokens) {
  std::vector<Sample> samples(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    samples[i].uid = static_cast<int64_t>(i);
    samples[i].tokens = tokens[i];
  }
  return samples;
}

// One trie with all that a pass over it needs.
struct Batch {
  Batch(const std::vector<Sample>& samples, bool share, const ComputeOptions& options)
      : trie(trie::build(samples, {.share = share})),
        edges(trie::edges_of(trie, samples, &logical)),
        attention(trie, options) {}
  Batch(const Batch&) = delete;

  at::Tensor ids() const { return at::tensor(trie.tok, at::kInt); }
  at::Tensor positions() const { return at::tensor(trie.pos, at::kInt); }
  at::Tensor sources() const { return at::tensor(edges.source, at::kInt).to(at::kLong); }
  ops::EdgeIndex index() const {
    return {at::tensor(edges.row_offsets, at::kInt), at::tensor(edges.token, at::kInt)};
  }

  trie::Trie trie;
  trie::LogicalTokens logical;
  trie::Edges edges;
  ops::TrieAttention attention;
};

}  // namespace banyan::models
