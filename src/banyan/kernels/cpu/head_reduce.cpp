// The reductions of the head: one tile of logits into running sums, and what a finished sum gives.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "banyan/kernels/cpu/head.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

namespace {

// Vectors are passed between functions that are always inlined, so their calling convention does
// not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

using Lanes = float __attribute__((vector_size(4 * kLanes)));

BANYAN_INLINE Lanes load(const float* values) {
  Lanes lanes;
  std::memcpy(&lanes, values, sizeof(lanes));
  return lanes;
}

BANYAN_INLINE void store(float* values, const Lanes& lanes) {
  std::memcpy(values, &lanes, sizeof(lanes));
}

BANYAN_INLINE Lanes maximum(const Lanes& a, const Lanes& b) { return a < b ? b : a; }

// Sum over the vectors of a tile, lane by lane, in four interleaved chains.
BANYAN_INLINE Lanes sum_lanes(const float* values) {
  Lanes sum[4] = {
      load(values), load(values + kLanes), load(values + 2 * kLanes), load(values + 3 * kLanes)};
  for (int64_t i = 4 * kLanes; i < kVocabTile; i += 4 * kLanes) {
    for (int64_t c = 0; c < 4; ++c) sum[c] += load(values + i + c * kLanes);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Sixteen lanes to one, in one tree.
BANYAN_INLINE float sum_tree(float* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// Adds one row of one tile to the lanes of the row.
BANYAN_MULTIVERSION
void add_row(const float* z,
             int64_t columns,
             float inverse_temperature,
             bool with_entropy,
             LaneState& state,
             TileMass* mass,
             uint16_t* kept,
             float* kept_max) {
  alignas(64) float s[kVocabTile];
  alignas(64) float p[kVocabTile];
  alignas(64) float max[kLanes];
  alignas(64) float shift[kLanes];
  alignas(64) float scale[kLanes];
  if (columns == kVocabTile) {
    for (int64_t i = 0; i < kVocabTile; ++i) s[i] = z[i] * inverse_temperature;
  } else {
    for (int64_t i = 0; i < columns; ++i) s[i] = z[i] * inverse_temperature;
    for (int64_t i = columns; i < kVocabTile; ++i) s[i] = -std::numeric_limits<float>::infinity();
  }
  Lanes largest[4] = {load(state.max), load(s), load(s + kLanes), load(s + 2 * kLanes)};
  for (int64_t i = 3 * kLanes, c = 0; i < kVocabTile; i += kLanes, ++c) {
    largest[c % 4] = maximum(largest[c % 4], load(s + i));
  }
  store(max, maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3])));
  for (int64_t l = 0; l < kLanes; ++l) shift[l] = state.max[l] - max[l];
  for (int64_t l = 0; l < kLanes; ++l) scale[l] = exp_f32(shift[l]);
  for (int64_t i = 0; i < kVocabTile; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) p[i + l] = exp_f32(s[i + l] - max[l]);
  }
  if (kept != nullptr) {
    for (int64_t i = 0; i < kVocabTile; ++i) kept[i] = f32_to_bf16(p[i]);
    store(kept_max, load(max));
  }
  if (with_entropy) {
    for (int64_t i = 0; i < kVocabTile; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        const float below = s[i + l] - max[l];
        s[i + l] =
            p[i + l] * (below < -88.0f ? -88.0f : below);  // e^-88 counts as 0, so no 0 * inf
      }
    }
    const Lanes weighted = load(state.weighted) + load(shift) * load(state.sum);
    store(state.weighted, load(scale) * weighted + sum_lanes(s));
  }
  const Lanes tile_sum = sum_lanes(p);
  store(state.sum, load(scale) * load(state.sum) + tile_sum);
  store(state.max, load(max));
  if (mass == nullptr) return;
  float most = max[0];
  for (int64_t l = 1; l < kLanes; ++l) most = most < max[l] ? max[l] : most;
  store(scale, tile_sum);
  for (int64_t l = 0; l < kLanes; ++l) scale[l] *= exp_f32(max[l] - most);
  *mass = {most, sum_tree(scale)};
}

}  // namespace

SoftmaxState collapse(const LaneState& lanes) {
  SoftmaxState state{*std::max_element(lanes.max, lanes.max + kLanes), 0.0, 0.0};
  for (int64_t l = 0; l < kLanes; ++l) {
    const float shift = lanes.max[l] - state.max;
    const double scale = exp_f32(shift);
    state.sum += scale * lanes.sum[l];
    state.weighted += scale * (lanes.weighted[l] + static_cast<double>(shift) * lanes.sum[l]);
  }
  return state;
}

void merge(SoftmaxState& state, const SoftmaxState& next) {
  if (state.sum == 0.0) {
    state = next;
    return;
  }
  const float max = std::max(state.max, next.max);
  const auto add = [&](const SoftmaxState& part, double& sum, double& weighted) {
    const double shift = static_cast<double>(part.max) - max;
    const double scale = shift == 0.0 ? 1.0 : std::exp(shift);
    sum += scale * part.sum;
    weighted += scale * part.weighted + (scale == 0.0 ? 0.0 : scale * shift * part.sum);
  };
  double sum = 0.0;
  double weighted = 0.0;
  add(state, sum, weighted);
  add(next, sum, weighted);
  state = {max, sum, weighted};
}

double log_sum_exp(const SoftmaxState& state) { return state.max + std::log(state.sum); }

double entropy(const SoftmaxState& state) {
  return std::log(state.sum) - state.weighted / state.sum;
}

void reduce_tile(const float* z,
                 int64_t ldz,
                 int64_t rows,
                 int64_t columns,
                 float inverse_temperature,
                 bool with_entropy,
                 LaneState* states,
                 const KeptProbabilities& kept,
                 int64_t first_row,
                 int64_t tile) {
  for (int64_t row = 0; row < rows; ++row) {
    const bool keeps = first_row + row < kept.rows;
    add_row(z + row * ldz,
            columns,
            inverse_temperature,
            with_entropy,
            states[row],
            /*mass=*/nullptr,
            keeps ? kept.values_at(first_row + row, tile) : nullptr,
            keeps ? kept.max_at(first_row + row, tile) : nullptr);
  }
}

TileMass reduce_row(const float* z, int64_t columns, float inverse_temperature, LaneState& state) {
  TileMass mass;
  add_row(z,
          columns,
          inverse_temperature,
          /*with_entropy=*/false,
          state,
          &mass,
          /*kept=*/nullptr,
          /*kept_max=*/nullptr);
  return mass;
}

void logits_logprob(const float* logits,
                    int64_t rows,
                    int64_t vocabulary,
                    const int32_t* token,
                    float inverse_temperature,
                    float* logprob) {
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* z = logits + row * vocabulary;
      SoftmaxState whole;
      for (int64_t first = 0; first < vocabulary; first += kVocabSegment) {
        const int64_t last = std::min(vocabulary, first + kVocabSegment);
        LaneState segment;
        for (int64_t v = first; v < last; v += kVocabTile) {
          reduce_tile(z + v,
                      /*ldz=*/0,
                      /*rows=*/1,
                      std::min(kVocabTile, last - v),
                      inverse_temperature,
                      /*with_entropy=*/false,
                      &segment);
        }
        merge(whole, collapse(segment));
      }
      const float chosen = z[token[row]] * inverse_temperature;
      logprob[row] = static_cast<float>(chosen - log_sum_exp(whole));
    }
  });
}

}  // namespace banyan::kernels
