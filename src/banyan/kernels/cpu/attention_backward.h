// Attention backward over one packed trie, bf16 with fp32 accumulation.
//
// Keys are cut into *chunks* of at most 64 tokens of one path, chunks that follow one another on it
// are taken together in *runs* of up to kRunChunks, queries are cut into *tiles* of up to 64 packed
// tokens: one chunk, or several small ones, whatever paths they are on. With P = e^(scale S - lse),
// dP = dO Vᵀ, delta = rowsum(dO * O) and dS = P * (dP - delta), one work item is one run and the
// tiles of its subtree, which follow one another:
//   dV = sum bf16(P)ᵀ dO,  dK = scale sum bf16(dS)ᵀ Q   over the tiles, ascending, query heads in
//   order
//   dQ of a tile += bf16(dS) K
// dK and dV have one writer. dQ of a tile has several, which take turns: the runs that the tile
// sees add to it in packed order (on a path: root first), each when the one before has. Runs are
// handed out in that order, so the one that a thread waits for is always running or done; and every
// sum has one order whatever the threads (specification A4).
//
// Keys of the first chunks may be *carried* from other blocks (specification A12): they have no
// query here, and their sums are added to accumulators. A token that later blocks attended to has
// an accumulator too, which is added to its own sum before the one rounding.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/scratch.h"

namespace banyan::kernels {

// A tile of queries that comes from far in memory is read once for so many chunks.
inline constexpr int64_t kRunChunks = 4;

struct TrieChunk {
  int32_t begin = 0;  // packed tokens [begin, end), 1..64 of them
  int32_t end = 0;
  int32_t subtree_end = 0;  // packed tokens [begin, subtree_end) hold the subtree of `begin`
};

struct ChunkRun {
  int32_t first_chunk = 0;  // chunks [first_chunk, last_chunk), 1..kRunChunks of them
  int32_t last_chunk = 0;
  int32_t first_tile = 0;  // tiles [first_tile, last_tile) hold the queries of their subtrees
  int32_t last_tile = 0;
  int32_t turns = 0;  // its turn at tile first_tile + i is turns[this + i]
};

struct AttendBackwardInput {
  AttentionShape shape;
  int64_t num_carried = 0;             // tokens [0, C) are keys only; row t - C below is token t
  const uint16_t* q = nullptr;         // [T - C, H, D] bf16
  int64_t q_stride = 0;                // from one token's queries to the next ones
  const uint16_t* out = nullptr;       // [T - C, H, D]
  const uint16_t* grad_out = nullptr;  // [T - C, H, D]
  const float* lse = nullptr;          // [T - C, H]
  const uint16_t* const* k = nullptr;  // [T]: the row [K, D] of each token
  const uint16_t* const* v = nullptr;  // [T]
  const TrieChunk* chunks = nullptr;   // in packed order; none holds tokens before and after C
  int64_t num_chunks = 0;
  int64_t first_own = 0;           // chunks of tokens [C, T)
  const ChunkRun* runs = nullptr;  // in packed order
  int64_t num_runs = 0;
  const int32_t* turns = nullptr;        // of every run at every tile of it: 0, 1, ... per tile
  const int32_t* tile_begins = nullptr;  // [tiles + 1]: rows [this, next) of the queries
  const int32_t* tile_turns = nullptr;   // [tiles]: turns of each tile
  int64_t num_tiles = 0;
  int64_t num_queries() const { return chunks[num_chunks - 1].end - num_carried; }  // T - C
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

// `sums` holds lse, delta and dQ of one kv head, or of more within 32 MiB: H / K (D + 2) floats per
// query.
void attend_backward(const AttendBackwardInput& input,
                     const AttendGradients& gradients,
                     Scratch& sums);

}  // namespace banyan::kernels
