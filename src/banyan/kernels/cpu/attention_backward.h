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
  const uint16_t* q = nullptr;         // [T, H, D] bf16
  const uint16_t* k = nullptr;         // [T, K, D]
  const uint16_t* v = nullptr;         // [T, K, D]
  const uint16_t* out = nullptr;       // [T, H, D]
  const uint16_t* grad_out = nullptr;  // [T, H, D]
  const float* lse = nullptr;          // [T, H]
  const TrieChunk* chunks = nullptr;   // in packed order
  int64_t num_chunks = 0;
  int64_t max_depth = 0;  // largest `depth`
};

struct AttendGradients {
  uint16_t* dq = nullptr;  // [T, H, D] bf16
  uint16_t* dk = nullptr;  // [T, K, D]
  uint16_t* dv = nullptr;  // [T, K, D]
};

// `packs` holds the packed operands of one kv head: (3 + 4 H / K) D bf16 per token.
void attend_backward(const AttendBackwardInput& input,
                     const AttendGradients& gradients,
                     Scratch& packs);

}  // namespace banyan::kernels
