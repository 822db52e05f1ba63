// Attention forward over tiles, bf16 with fp32 accumulation: one kernel for the trie of a training
// block and for the paged pool of the rollout.
//
// Row t attends the first visible[t] path positions, which lie in tiles tile_lists[t][0], [1], ...
// Tiles are merged in ascending order with a running (m, l, O):
//   S = scale Q Kᵀ;  m' = max(m, max S);  a = e^(m - m');  P = e^(S - m'), exactly 0 beyond the
//   row's own position;  l' = a l + sum P;  O' = a O + (bf16(P) V + 0), which is never -0;  at the
//   end out = O / l, lse = m + log l
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022). Neighbouring rows that read the same tile ride in one matrix product
// (one pass over a trunk for all siblings); the bits of a row depend on its q and on its path
// alone.
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
  int64_t q_stride = 0;                        // from one token's queries to the next ones
  const uint16_t* tiles = nullptr;             // [tiles, K, tile_elements(D)] bf16
  const int32_t* const* tile_lists = nullptr;  // [T]: per token its tiles, path positions ascending
  const int32_t* visible = nullptr;            // [T]: path positions seen, itself included (>= 1)
  // [T] or null. With runs, every sequence attends by itself: only tokens of one run share a
  // product, and each run makes its own pass over its tiles.
  const int32_t* runs = nullptr;
  bool fused = true;  // in registers where the processor can (attention_rows.h); the same bits
};

// out [T, H, D] bf16; lse [T, H] fp32 or null. Parallel over (kv head, block of tokens).
void attend(const AttendInput& input, uint16_t* out, float* lse);

// --- Parts, for a team of threads ---

// How the work is cut. It decides who computes a row, never how.
struct AttendPlan {
  int64_t block_tokens = 0;
  int64_t num_blocks = 0;
  int64_t heads_per_item = 1;  // kv heads: all of them where every sequence attends by itself
  int64_t num_items = 0;       // (kv heads, block), blocks innermost
  int64_t scratch_bytes = 0;   // of one thread
};
// Large blocks read a shared tile once for many rows, small ones give the threads equal parts. For
// a few tokens the choice weighs the two by costs measured at the first call (attention_plan.cpp):
// the gate of grouped attention, since a block of one token shares nothing.
AttendPlan attend_plan(const AttendInput& input, int64_t threads);
int64_t attend_scratch_bytes(const AttentionShape& shape, int64_t block_tokens);
// One item, one thread; scratch is 64-byte aligned.
void attend_item(const AttendInput& input,
                 const AttendPlan& plan,
                 int64_t item,
                 void* scratch,
                 uint16_t* out,
                 float* lse);

}  // namespace banyan::kernels
