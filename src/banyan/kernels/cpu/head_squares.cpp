// Sums of squared probabilities of rows of logits; sixteen lanes inside a tile of the vocabulary,
// tiles in ascending order in fp64.
#include <ATen/Parallel.h>

#include <algorithm>

#include "banyan/kernels/cpu/head.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

// Sum over one tile of e^(2 (z / tau - lse)).
BANYAN_MULTIVERSION
float squares_of_tile(const float* __restrict z,
                      int64_t columns,
                      float inverse_temperature,
                      float lse) {
  float lanes[kLanes] = {};
  const int64_t whole = columns / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const float p = exp_f32(fma(z[first + i], inverse_temperature, -lse));
      lanes[i] = fma(p, p, lanes[i]);
    }
  }
  for (int64_t j = whole; j < columns; ++j) {
    const float p = exp_f32(fma(z[j], inverse_temperature, -lse));
    lanes[j - whole] = fma(p, p, lanes[j - whole]);
  }
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

void sum_squared_probabilities(const float* logits,
                               int64_t rows,
                               int64_t vocabulary,
                               float inverse_temperature,
                               const float* lse,
                               float* out) {
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* z = logits + row * vocabulary;
      double sum = 0.0;
      for (int64_t first = 0; first < vocabulary; first += kVocabTile) {
        const int64_t columns = std::min(kVocabTile, vocabulary - first);
        sum += squares_of_tile(z + first, columns, inverse_temperature, lse[row]);
      }
      out[row] = static_cast<float>(sum);
    }
  });
}

}  // namespace banyan::kernels
