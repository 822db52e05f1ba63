// What distinguishes one decoder from another: sizes and the few structural choices of Llama, Qwen2
// and Qwen3.
#pragma once

#include <cstdint>

#include "banyan/nn/rope_table.h"

namespace banyan::nn {

// What stands on the final norm: next-token logits, or one value per token (critic, reward model).
enum class HeadKind : uint8_t { kVocabulary, kValue };

struct DecoderOptions {
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  double norm_eps = 1e-6;
  bool tied = false;      // the vocabulary head is the embedding
  bool qkv_bias = false;  // biases on q, k and v
  bool out_bias = false;  // bias on o
  bool mlp_bias = false;  // biases on gate, up and down
  bool qk_norm = false;   // RMSNorm of each query and key head before RoPE
  HeadKind head = HeadKind::kVocabulary;
  bool value_bias = true;  // the value head has a bias
  RopeOptions rope;
};

}  // namespace banyan::nn
