// What distinguishes one decoder from another: sizes and the few structural choices of Llama,
// Qwen2, Qwen3 and Qwen3-MoE.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "banyan/nn/rope_table.h"

namespace banyan::parallel {
class Collectives;
class PipelineStage;
class TensorParallel;
}  // namespace banyan::parallel

namespace banyan::nn {

// What stands on the final norm: next-token logits, or one value per token (critic, reward model).
enum class HeadKind : uint8_t { kVocabulary, kValue };

// Mixture of experts: which layers have it, and its sizes.
struct MoeOptions {
  int64_t num_experts = 0;                 // 0: every layer has one feed-forward network
  int64_t num_chosen = 0;                  // experts of a token
  int64_t intermediate = 0;                // of one expert
  bool renormalise = false;                // weights of the chosen experts sum to one
  bool router_in_double = false;           // logits and probabilities of the router in fp64
  int64_t sparse_step = 1;                 // layer i has experts if sparse_step divides i + 1 ...
  std::vector<int64_t> dense_layers = {};  // ... and it is none of these

  // Ranks over which the experts are dealt out; null: all of them are here.
  parallel::Collectives* ranks = nullptr;
  // Where experts are not cut as the rest of a layer is: ranks that hold the other parts of the
  // experts here, alone where these are whole; `ranks` is then there too. `intermediate` is the run
  // that is here, [first_intermediate, first_intermediate + intermediate) of whole_intermediate.
  parallel::Collectives* parts = nullptr;
  int64_t first_intermediate = 0;
  int64_t whole_intermediate = 0;

  bool has_experts(int64_t layer) const {
    return num_experts > 0 && (layer + 1) % sparse_step == 0 &&
           std::find(dense_layers.begin(), dense_layers.end(), layer) == dense_layers.end();
  }
};

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
  MoeOptions moe;

  int64_t num_moe_layers() const {
    int64_t count = 0;
    for (int64_t i = 0; i < layers; ++i) count += moe.has_experts(i) ? 1 : 0;
    return count;
  }
  // The ranks that hold the other parts of each layer; null: all of it is here. Heads,
  // intermediate and vocab are then this rank's (parallel/tensor_parallel.h).
  const parallel::TensorParallel* tensor = nullptr;
  // The stages of a pipeline that this rank has; null: all layers, with embedding and head.
  const parallel::PipelineStage* stage = nullptr;
};

}  // namespace banyan::nn
