// The reductions of the head: one tile of logits into running sums, and what a finished sum gives.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "banyan/kernels/cpu/head.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

namespace {

// Halves `values` until one is left. A tree: short error, and each step is a loop without a carried
// sum.
BANYAN_INLINE float tree_sum(float* __restrict values) {
#pragma GCC unroll 8
  for (int64_t half = kVocabTile / 2; half >= 1; half /= 2) {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

BANYAN_INLINE float tree_max(const float* __restrict values, float* __restrict work) {
  for (int64_t i = 0; i < kVocabTile / 2; ++i) {
    const float a = values[i];
    const float b = values[i + kVocabTile / 2];
    work[i] = a < b ? b : a;
  }
#pragma GCC unroll 8
  for (int64_t half = kVocabTile / 4; half >= 1; half /= 2) {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i)
      work[i] = work[i] < work[i + half] ? work[i + half] : work[i];
  }
  return work[0];
}

// Σ e^(s - max) and Σ e^(s - max) (s - max) of one tile, max included in the result.
BANYAN_MULTIVERSION
SoftmaxState tile_state(const float* z,
                        int64_t columns,
                        float inverse_temperature,
                        bool with_entropy) {
  alignas(64) float s[kVocabTile];
  alignas(64) float work[kVocabTile];
  if (columns == kVocabTile) {
    for (int64_t i = 0; i < kVocabTile; ++i) s[i] = z[i] * inverse_temperature;
  } else {
    for (int64_t i = 0; i < columns; ++i) s[i] = z[i] * inverse_temperature;
    for (int64_t i = columns; i < kVocabTile; ++i) s[i] = -std::numeric_limits<float>::infinity();
  }
  SoftmaxState state;
  state.max = tree_max(s, work);
  for (int64_t i = 0; i < kVocabTile; ++i) work[i] = exp_f32(s[i] - state.max);
  if (with_entropy) {
    for (int64_t i = 0; i < kVocabTile; ++i) {
      const float below = s[i] - state.max;
      s[i] = work[i] * (below < -88.0f ? -88.0f : below);  // e^-88 counts as 0, so no 0 * inf
    }
    state.weighted = tree_sum(s);
  }
  state.sum = tree_sum(work);
  return state;
}

}  // namespace

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
                 SoftmaxState* states,
                 int64_t state_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    merge(states[row * state_stride],
          tile_state(z + row * ldz, columns, inverse_temperature, with_entropy));
  }
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
        SoftmaxState segment;
        for (int64_t v = first; v < last; v += kVocabTile) {
          const int64_t columns = std::min(kVocabTile, last - v);
          reduce_tile(
              z + v, 0, 1, columns, inverse_temperature, /*with_entropy=*/false, &segment, 0);
        }
        merge(whole, segment);
      }
      const float chosen = z[token[row]] * inverse_temperature;
      logprob[row] = static_cast<float>(chosen - log_sum_exp(whole));
    }
  });
}

}  // namespace banyan::kernels
