// The elementwise part of attention's backward, between its matrix products.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// sum over d of a * b: delta of a row, from dO and O.
float row_dot(int64_t head_dim, const uint16_t* a, const uint16_t* b);

// out = bf16(scale * acc), n values.
void round_scaled(int64_t n, float scale, const float* acc, uint16_t* out);
// out = bf16(scale * acc + sums).
void round_scaled_sums(int64_t n, float scale, const float* acc, const float* sums, uint16_t* out);
// sums += scale * acc.
void add_scaled(int64_t n, float scale, const float* acc, float* sums);
// to += from.
void add_values(int64_t n, const float* from, float* to);

// Scores of a tile of queries (rows) against a chunk of keys (columns), and what is known of rows
// and columns.
struct ScoreTile {
  int64_t rows = 0;         // queries
  int64_t padded_rows = 0;  // even; rows beyond are written as zeros
  int64_t keys = 0;         // columns, padded ones included
  int64_t valid = 0;        // keys that exist
  int64_t first_seen = 0;   // keys that row 0 sees; each later row sees one more, up to `valid`
  float scale = 1.0f;
  const float* scores = nullptr;      // [padded_rows, keys]: Q Kᵀ
  const float* grad_probs = nullptr;  // [padded_rows, keys]: dO Vᵀ
  const float* lse = nullptr;         // [padded_rows]
  const float* delta = nullptr;       // [padded_rows]
};

// P = e^(scale S - lse) and dS = P (dP - delta), exactly 0 where a row does not see a key, rounded
// to bf16. Pairs of neighbouring rows stand side by side, [padded_rows / 2][keys][2], as the right
// operand of a product over rows wants them; dS is also written row by row.
void gradient_scores(const ScoreTile& tile,
                     uint32_t* prob_pairs,
                     uint32_t* grad_pairs,
                     uint16_t* grad_rows);

}  // namespace banyan::kernels
