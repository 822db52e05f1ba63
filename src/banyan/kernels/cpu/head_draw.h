// Drawing tokens from softmax(z / T) without ever holding the logits of a row: the head's pass over
// the vocabulary (head.h) leaves one mass per tile of kVocabTile ids beside its log-sum-exp; the
// inverse of the cumulative distribution picks a tile, and only that tile is computed again.
//   s = z / T;  tile t: max_t = the largest s of its segment up to its end,  sum_t = sum of
//   e^(s - max_t) over the tile
//   w_t = sum_t e^(max_t - max),  total = sum of w_t in ascending t (fp64),  target = u total
// The token is the first whose cumulative mass exceeds the target: tiles by w_t, then the tile's
// ids by e^(s - max). A draw depends on the row and on u alone, whether the logits come tile by
// tile (head_draw) or are stored (row_law and its kin): both give the same bits.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/head.h"

namespace banyan::kernels {

constexpr int64_t vocab_tiles(int64_t vocabulary) { return divide_up(vocabulary, kVocabTile); }

// What the masses [vocab_tiles] of a row give together. From then on masses[t].sum is w_t.
struct RowLaw {
  float max = 0.0f;      // of s
  double total = 0.0;    // of the masses, relative to max
  double log_sum = 0.0;  // log-sum-exp of s, with the bits of scoring: log p = s - log_sum
  bool finite() const;   // false if a logit is NaN or +inf, or all are -inf
};

// The law of stored logits z [vocabulary]; fills masses.
RowLaw row_law(const float* z, int64_t vocabulary, float inverse_temperature, TileMass* masses);

struct TilePick {
  int64_t tile = 0;
  double start = 0.0;   // mass of the tiles before it
  double target = 0.0;  // u total
};
TilePick pick_tile(const RowLaw& law, const TileMass* masses, int64_t vocabulary, float u);
// Index of the token in its tile; z: the tile's `count` logits.
int64_t pick_in_tile(const RowLaw& law,
                     const TilePick& pick,
                     const float* z,
                     int64_t count,
                     float inverse_temperature);
// The tile of the largest logit, the first of equal ones, and its index there.
int64_t largest_tile(const RowLaw& law, const TileMass* masses, int64_t vocabulary);
int64_t largest_in_tile(const RowLaw& law,
                        const float* z,
                        int64_t count,
                        float inverse_temperature);

// Draws of row r: [row_offsets[r], row_offsets[r + 1]).
struct HeadDrawInput {
  const BFloat16* hidden = nullptr;  // [rows, E]
  int64_t ld_hidden = 0;
  int64_t rows = 0;
  Panels weight;                               // columns = vocabulary, depth = E
  const float* inverse_temperature = nullptr;  // [rows]
  const uint8_t* greedy = nullptr;             // [rows]: the largest logit instead of a draw
  const int32_t* row_offsets = nullptr;        // [rows + 1]
  const float* uniform = nullptr;              // [draws] in [0, 1)
};
struct HeadDrawOutput {
  int32_t* token = nullptr;  // [draws]; -1 where the row is not finite
  float* logprob = nullptr;  // [draws]: s[token] - log_sum
  float* raw = nullptr;      // [draws] or null: the same at T = 1
};

// Parallel.
void head_draw(const HeadDrawInput& input, const HeadDrawOutput& output);

}  // namespace banyan::kernels
