// One tile of queries of one head against one chunk of keys: the step that attention's backward
// repeats (formulas in attention_backward.h). With avx512_bf16 in registers, without what the
// causal mask hides (attention_gradient_rows.cpp), else by the separate steps of
// attention_tile.h and attention_gradient_scores.h.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

struct GradientTile {
  int64_t head_dim = 0;  // even
  float scale = 1.0f;

  int64_t rows = 0;                    // queries, 1..64
  const uint16_t* q = nullptr;         // [rows, D] bf16
  int64_t q_stride = 0;                // from row to row
  const uint16_t* grad_out = nullptr;  // [rows, D]: dO
  int64_t grad_stride = 0;
  const uint16_t* q_pairs = nullptr;     // [round_up(rows, 16) / 2][D][2], zero beyond the rows
  const uint16_t* grad_pairs = nullptr;  // likewise
  const float* lse = nullptr;            // [rows], readable up to the next multiple of 16
  const float* delta = nullptr;          // likewise

  int64_t keys = 0;        // 1..64
  int64_t first_seen = 0;  // keys that row 0 sees; each later row sees one more, up to `keys`
  const uint16_t* key_columns = nullptr;    // [D / 2][width][2], zero beyond the keys
  const uint16_t* key_pairs = nullptr;      // [width / 2][D][2]
  const uint16_t* value_columns = nullptr;  // [D / 2][width][2]

  bool fused = true;  // in registers where the processor can; the same bits

  int64_t width() const { return round_up(keys, kRowStep); }
};

// What one step hands to the next; of one thread.
struct GradientScratch {
  float* scores = nullptr;         // [64, width]: S
  float* grad_probs = nullptr;     // [64, width]: dP
  uint32_t* prob_words = nullptr;  // [32][width]: P of two neighbouring rows
  uint32_t* grad_words = nullptr;  // [32][width]: dS of them
  uint16_t* grad_rows = nullptr;   // [64, width]: dS
  uint16_t* words_t = nullptr;     // [width, 64]: P or dS, transposed
  uint16_t* rows = nullptr;        // [64, D]: queries filled up with zeros
  float* dq = nullptr;             // [64, D]
};
GradientScratch carve_gradient_scratch(Carver& carver, int64_t head_dim);

// dV += bf16(P)ᵀ dO and dK += bf16(dS)ᵀ Q, [width, D] each (rows beyond the keys may be left out).
void key_gradients(const GradientTile& tile, const GradientScratch& scratch, float* dk, float* dv);

// dQ [rows, D] = or += bf16(dS) K, of the same tile and scratch after key_gradients.
void query_gradients(const GradientTile& tile, const GradientScratch& scratch, bool add, float* dq);

}  // namespace banyan::kernels
