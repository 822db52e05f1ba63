// Attention forward over tiles, bf16 with fp32 accumulation: one kernel for the trie of a training
// block and for the paged pool of the rollout.
//
// Row t attends the first visible[t] path positions, which lie in tiles tile_lists[t][0], [1], ...
// Tiles are merged in ascending order with a running (m, l, O):
//   S = scale Q Kᵀ;  m' = max(m, max S);  a = e^(m - m');  P = e^(S - m'), exactly 0 beyond the
//   row's own position;  l' = a l + sum P;  O' = a O + bf16(P) V;  at the end out = O / l, lse = m
//   + log l
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022). Neighbouring rows that read the same tile ride in one matrix product;
// the bits of a row depend on its q and on its path alone.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/attention_tile.h"

namespace banyan::kernels {

struct AttentionShape {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;  // even
  float scale = 1.0f;
  int64_t group() const { return num_heads / num_kv_heads; }
};

struct AttendInput {
  AttentionShape shape;
  int64_t num_tokens = 0;
  const uint16_t* q = nullptr;                 // [T, H, D] bf16
  const uint16_t* tiles = nullptr;             // [tiles, K, tile_elements(D)] bf16
  const int32_t* const* tile_lists = nullptr;  // [T]: per token its tiles, path positions ascending
  const int32_t* visible = nullptr;            // [T]: path positions seen, itself included (>= 1)
};

// out [T, H, D] bf16; lse [T, H] fp32 or null. Parallel over (kv head, block of tokens).
void attend(const AttendInput& input, uint16_t* out, float* lse);

}  // namespace banyan::kernels
