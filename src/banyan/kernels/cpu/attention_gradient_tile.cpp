// The separate steps. Row counts are rounded up where brgemm wants it: rows beyond the queries are
// zeros, and so are their probabilities.
#include "banyan/kernels/cpu/attention_gradient_tile.h"

#include <algorithm>
#include <cstring>

#include "banyan/kernels/cpu/attention_gradient_rows.h"
#include "banyan/kernels/cpu/attention_gradient_scores.h"
#include "banyan/kernels/cpu/attention_tile.h"

namespace banyan::kernels {
namespace {

// Pairs of rows are the depth of products.
int64_t padded_queries(const GradientTile& tile) {
  return round_up(tile.rows, std::max<int64_t>(row_step(), 2));
}

// S or dP: rows of x times columns.
void multiply_rows(const GradientTile& tile,
                   const uint16_t* x,
                   int64_t stride,
                   const uint16_t* columns,
                   uint16_t* copy,
                   float* out) {
  const int64_t padded = padded_queries(tile);
  const int64_t dim = tile.head_dim;
  if (padded != tile.rows) {
    const size_t bytes = static_cast<size_t>(dim) * sizeof(uint16_t);
    for (int64_t i = 0; i < tile.rows; ++i) std::memcpy(copy + i * dim, x + i * stride, bytes);
    std::memset(copy + tile.rows * dim, 0, static_cast<size_t>(padded - tile.rows) * bytes);
    x = copy;
    stride = dim;
  }
  tile_gemm({.m = padded,
             .n = tile.width(),
             .k = dim,
             .a = x,
             .lda = stride,
             .b = columns,
             .c = out,
             .ld = tile.width()});
}

// sums [width, D] += wordsᵀ pairs.
void add_transposed(const GradientTile& tile,
                    const uint32_t* words,
                    const uint16_t* pairs,
                    uint16_t* words_t,
                    float* sums) {
  const int64_t padded = padded_queries(tile);
  const int64_t width = tile.width();
  const uint16_t* lines[kTileTokens / 2];
  for (int64_t i = 0; i < padded / 2; ++i) {
    lines[i] = reinterpret_cast<const uint16_t*>(words + i * width);
  }
  pack_columns(lines, padded / 2, padded / 2, 2 * width, words_t);
  tile_gemm(width, tile.head_dim, padded, /*accumulate=*/true, words_t, pairs, sums);
}

bool is_fused(const GradientTile& tile) {
  return tile.fused && gradient_rows_available(tile.head_dim);
}

}  // namespace

GradientScratch carve_gradient_scratch(Carver& carver, int64_t head_dim) {
  constexpr int64_t kArea = kTileTokens * kTileTokens;
  GradientScratch scratch;
  scratch.scores = carver.take<float>(kArea);
  scratch.grad_probs = carver.take<float>(kArea);
  scratch.prob_words = carver.take<uint32_t>(kArea / 2);
  scratch.grad_words = carver.take<uint32_t>(kArea / 2);
  scratch.grad_rows = carver.take<uint16_t>(kArea);
  scratch.words_t = carver.take<uint16_t>(kArea);
  scratch.rows = carver.take<uint16_t>(kTileTokens * head_dim);
  scratch.dq = carver.take<float>(kTileTokens * head_dim);
  return scratch;
}

void key_gradients(const GradientTile& tile, const GradientScratch& scratch, float* dk, float* dv) {
  if (is_fused(tile)) return key_gradients_in_registers(tile, scratch, dk, dv);
  multiply_rows(tile, tile.q, tile.q_stride, tile.key_columns, scratch.rows, scratch.scores);
  multiply_rows(
      tile, tile.grad_out, tile.grad_stride, tile.value_columns, scratch.rows, scratch.grad_probs);
  gradient_scores({.rows = tile.rows,
                   .padded_rows = padded_queries(tile),
                   .keys = tile.width(),
                   .valid = tile.keys,
                   .first_seen = tile.first_seen,
                   .scale = tile.scale,
                   .scores = scratch.scores,
                   .grad_probs = scratch.grad_probs,
                   .lse = tile.lse,
                   .delta = tile.delta},
                  scratch.prob_words,
                  scratch.grad_words,
                  scratch.grad_rows);
  add_transposed(tile, scratch.prob_words, tile.grad_pairs, scratch.words_t, dv);
  add_transposed(tile, scratch.grad_words, tile.q_pairs, scratch.words_t, dk);
}

void query_gradients(const GradientTile& tile,
                     const GradientScratch& scratch,
                     bool add,
                     float* dq) {
  if (is_fused(tile)) return query_gradients_in_registers(tile, scratch, add, dq);
  const int64_t padded = padded_queries(tile);
  const bool in_place = padded == tile.rows;
  const int64_t size = tile.rows * tile.head_dim;
  tile_gemm(padded,
            tile.head_dim,
            tile.width(),
            /*accumulate=*/add && in_place,
            scratch.grad_rows,
            tile.key_pairs,
            in_place ? dq : scratch.dq);
  if (in_place) return;
  if (add) {
    add_values(size, scratch.dq, dq);
  } else {
    std::copy_n(scratch.dq, size, dq);
  }
}

}  // namespace banyan::kernels
