// The language-model head: log-softmax and entropy of z / tau, z = h Wᵀ, on selected tokens,
// without a [rows, vocabulary] array. Formulas: ops/edge_logprob.h.
//
// The vocabulary is walked in tiles of kVocabTile in ascending order inside segments of
// kVocabSegment; each segment keeps (max, sum, weighted sum), and segments are merged in ascending
// order. Both sizes are fixed, so a row's bits depend on the row alone, while (rows x segments)
// gives the threads enough equal work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "banyan/kernels/cpu/gemm.h"

namespace banyan::kernels {

inline constexpr int64_t kVocabTile = 256;
inline constexpr int64_t kVocabSegment = 16 * kVocabTile;

// Log-sum-exp of s = z / tau: sum = Σ e^(s - max), weighted = Σ e^(s - max) (s - max).
struct SoftmaxState {
  float max = 0.0f;
  double sum = 0.0;
  double weighted = 0.0;
};

// The same, running, for every kLanes-th logit of one row, so that a tile is added without a sum
// across lanes.
inline constexpr int64_t kLanes = 16;
struct alignas(64) LaneState {
  LaneState() { std::fill(max, max + kLanes, -1e30f); }  // finite, so that -inf logits count as 0

  float max[kLanes];
  float sum[kLanes] = {};
  float weighted[kLanes] = {};
};

// e^(s - m) of rows, in bf16, for a backward that does not compute the logits again: m is what the
// running maximum of the lane was when the tile was added. One tile of a row is [kVocabTile], with
// its kLanes maxima; a row has tiles() of them. `rows` may be fewer than those of the forward: the
// first ones.
struct KeptProbabilities {
  uint16_t* values = nullptr;  // [rows, tiles, kVocabTile]
  float* max = nullptr;        // [rows, tiles, kLanes]
  int64_t rows = 0;
  int64_t vocabulary = 0;

  int64_t tiles() const { return divide_up(vocabulary, kVocabTile); }
  uint16_t* values_at(int64_t row, int64_t tile) const {
    return values + (row * tiles() + tile) * kVocabTile;
  }
  float* max_at(int64_t row, int64_t tile) const { return max + (row * tiles() + tile) * kLanes; }
};

// Adds the logits z [rows, columns] (columns <= kVocabTile) to the states [rows]; `weighted` is
// kept only if with_entropy, and does not change the other bits. With `kept`, the tile's
// probabilities go to rows first_row, first_row + 1, ... of it, as far as it has them.
void reduce_tile(const float* z,
                 int64_t ldz,
                 int64_t rows,
                 int64_t columns,
                 float inverse_temperature,
                 bool with_entropy,
                 LaneState* states,
                 const KeptProbabilities& kept = {},
                 int64_t first_row = 0,
                 int64_t tile = 0);

// One tile of a row as a draw sees it (head_draw.h): the largest s of the row's segment so far, and
// the sum of e^(s - max) over the tile.
struct TileMass {
  float max = 0.0f;
  float sum = 0.0f;
};
// Adds one row to its state likewise (without `weighted`), and gives the tile's mass.
TileMass reduce_row(const float* z, int64_t columns, float inverse_temperature, LaneState& state);
// What the lanes of a segment give together.
SoftmaxState collapse(const LaneState& lanes);
// Appends the state of the next segment.
void merge(SoftmaxState& state, const SoftmaxState& next);
double log_sum_exp(const SoftmaxState& state);
double entropy(const SoftmaxState& state);

// What the head reads. Edges of row r: [row_offsets[r], row_offsets[r + 1]).
struct HeadInput {
  const BFloat16* hidden = nullptr;  // [rows, E]
  int64_t ld_hidden = 0;
  int64_t rows = 0;
  Panels weight;                         // columns = vocabulary, depth = E
  const int32_t* row_offsets = nullptr;  // [rows + 1]
  const int32_t* token = nullptr;        // [edges]
  float inverse_temperature = 1.0f;
};

// logprob [edges], lse [rows], entropy [rows] or null. Fills `kept`; the other results do not
// depend on it.
void head_forward(const HeadInput& input,
                  float* logprob,
                  float* lse,
                  float* entropy,
                  const KeptProbabilities& kept = {});

// Logits z [hidden.rows, kVocabTile] of `columns` tokens from `first` (a multiple of kPanel), one
// thread.
void logit_tile(
    const RowTile& hidden, const Panels& weight, int64_t first, int64_t columns, float* z);

// log_softmax(z / tau)[token] of rows of logits, with the bits of head_forward. Parallel.
void logits_logprob(const float* logits,
                    int64_t rows,
                    int64_t vocabulary,
                    const int32_t* token,
                    float inverse_temperature,
                    float* logprob);

// Sum over the vocabulary of softmax(z / tau)^2 per row of logits, whose lse is known. Parallel; a
// row's bits depend on the row alone.
void sum_squared_probabilities(const float* logits,
                               int64_t rows,
                               int64_t vocabulary,
                               float inverse_temperature,
                               const float* lse,
                               float* out);

struct HeadGradients {
  const float* lse = nullptr;           // [rows] of the forward
  const float* entropy = nullptr;       // [rows] of the forward; with grad_entropy only
  const float* grad_logprob = nullptr;  // [edges] or null
  const float* grad_entropy = nullptr;  // [rows] or null
  Panels weight_t;                      // columns = E, depth = vocabulary
  BFloat16* grad_hidden = nullptr;      // [rows, E], written
  float* grad_weight = nullptr;         // [vocabulary, E], added to
  KeptProbabilities kept;               // of the forward; not read with grad_entropy
};

// Logits are recomputed tile by tile for rows without kept probabilities; dz is rounded to bf16 for
// the two products, their sums stay fp32 and run in a fixed order.
void head_backward(const HeadInput& input, const HeadGradients& gradients);

}  // namespace banyan::kernels
