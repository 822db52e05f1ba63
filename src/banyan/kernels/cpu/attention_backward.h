// Attention backward over one packed trie, bf16 with fp32 accumulation.
//
// The packed tokens are cut into *chunks* of at most 64 tokens of one segment. With P = e^(scale S
// - lse), dP = dO Vᵀ, delta = rowsum(dO * O) and dS = P * (dP - delta):
//   pass 1, per key chunk:    dV = sum bf16(P)ᵀ dO,  dK = scale sum bf16(dS)ᵀ Q   over the chunks
//   of its
//                             subtree, which follow one another, in ascending order, query heads in
//                             order
//   pass 2, per query chunk:  dQ = scale sum bf16(dS) K   over the chunks of its path, root first
// Every output has one writer and one order of summation; nothing is atomic (specification A4).
//
// Keys of the first chunks may be *carried* from other blocks (specification A12): they have no
// query here, and their sums are added to accumulators. A token that later blocks attended to has
// an accumulator too, which is added to its own sum before the one rounding.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/scratch.h"

namespace banyan::kernels {

struct TrieChunk {
  int32_t begin = 0;  // packed tokens [begin, end), 1..64 of them
  int32_t end = 0;
  int32_t offset = 0;  // sum of round_up(size, 16) of the chunks before
  int32_t subtree_end =
      0;                // chunks [this, subtree_end) hold the subtree of the chunk's first token
  int32_t parent = -1;  // the chunk before on the path, or -1
  int32_t depth = 0;    // chunks before it on the path
};

struct AttendBackwardInput {
  AttentionShape shape;
  int64_t num_carried = 0;             // tokens [0, C) are keys only; row t - C below is token t
  const uint16_t* q = nullptr;         // [T - C, H, D] bf16
  const uint16_t* out = nullptr;       // [T - C, H, D]
  const uint16_t* grad_out = nullptr;  // [T - C, H, D]
  const float* lse = nullptr;          // [T - C, H]
  const uint16_t* const* k = nullptr;  // [T]: the row [K, D] of each token
  const uint16_t* const* v = nullptr;  // [T]
  const TrieChunk* chunks = nullptr;   // in packed order; none holds tokens before and after C
  int64_t num_chunks = 0;
  int64_t first_own = 0;  // chunks of tokens [C, T)
  int64_t max_depth = 0;  // largest `depth`
};

struct AttendGradients {
  uint16_t* dq = nullptr;  // [T - C, H, D] bf16
  uint16_t* dk = nullptr;  // [T - C, K, D]
  uint16_t* dv = nullptr;  // [T - C, K, D]
  // [T]: the accumulator row [K, D] of each token: of a carried one += its sums; of another, if not
  // null, added to its sums. Null: no token has one.
  float* const* dk_sums = nullptr;
  float* const* dv_sums = nullptr;
};

// `packs` holds the packed operands of one kv head: (3 + 4 H / K) D bf16 per token, 3 D per carried
// one.
void attend_backward(const AttendBackwardInput& input,
                     const AttendGradients& gradients,
                     Scratch& packs);

}  // namespace banyan::kernels
