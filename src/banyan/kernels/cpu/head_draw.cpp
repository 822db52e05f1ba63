// Laws of stored logits and the draws from them; the scheme is in the header.
#include "banyan/kernels/cpu/head_draw.h"

#include <algorithm>
#include <cmath>

#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

// masses[t].sum = w_t
BANYAN_MULTIVERSION
void weigh(TileMass* masses, int64_t tiles, float max) {
  for (int64_t t = 0; t < tiles; ++t) masses[t].sum *= exp_f32(masses[t].max - max);
}

// mass[i] = e^(s - max)
BANYAN_MULTIVERSION
void token_masses(
    const float* z, int64_t count, float inverse_temperature, float max, float* mass) {
  for (int64_t i = 0; i < count; ++i) mass[i] = exp_f32(z[i] * inverse_temperature - max);
}

// The states of a row's segments, in order.
RowLaw law_of(const SoftmaxState* states, int64_t segments, TileMass* masses, int64_t tiles) {
  SoftmaxState whole;
  for (int64_t s = 0; s < segments; ++s) merge(whole, states[s]);
  RowLaw law{.max = whole.max, .total = 0.0, .log_sum = log_sum_exp(whole)};
  weigh(masses, tiles, law.max);
  for (int64_t t = 0; t < tiles; ++t) law.total += masses[t].sum;
  return law;
}

}  // namespace

bool RowLaw::finite() const {
  return std::isfinite(log_sum) && std::isfinite(total) && total > 0.0;
}

RowLaw row_law(const float* z, int64_t vocabulary, float inverse_temperature, TileMass* masses) {
  SoftmaxState whole;
  for (int64_t first = 0; first < vocabulary; first += kVocabSegment) {
    const int64_t last = std::min(vocabulary, first + kVocabSegment);
    LaneState lanes;
    for (int64_t v = first; v < last; v += kVocabTile) {
      masses[v / kVocabTile] =
          reduce_row(z + v, std::min(kVocabTile, last - v), inverse_temperature, lanes);
    }
    merge(whole, collapse(lanes));
  }
  return law_of(&whole, 1, masses, vocab_tiles(vocabulary));
}

TilePick pick_tile(const RowLaw& law, const TileMass* masses, int64_t vocabulary, float u) {
  TilePick pick{.tile = 0, .start = 0.0, .target = static_cast<double>(u) * law.total};
  double end = 0.0;
  const int64_t tiles = vocab_tiles(vocabulary);
  for (int64_t t = 0; t < tiles && end <= pick.target; ++t) {
    if (masses[t].sum == 0.0f) continue;
    pick.tile = t;
    pick.start = end;
    end += masses[t].sum;
  }
  return pick;
}

int64_t pick_in_tile(const RowLaw& law,
                     const TilePick& pick,
                     const float* z,
                     int64_t count,
                     float inverse_temperature) {
  alignas(64) float mass[kVocabTile];
  token_masses(z, count, inverse_temperature, law.max, mass);
  // The last token with mass, should rounding keep the sum below the target.
  int64_t chosen = 0;
  double start = pick.start;
  for (int64_t i = 0; i < count && start <= pick.target; ++i) {
    if (mass[i] == 0.0f) continue;
    chosen = i;
    start += mass[i];
  }
  return chosen;
}

int64_t largest_tile(const RowLaw& law, const TileMass* masses, int64_t vocabulary) {
  // A tile's max covers the tiles of its segment before it, so the first with the row's has it.
  const int64_t tiles = vocab_tiles(vocabulary);
  int64_t t = 0;
  while (t + 1 < tiles && masses[t].max != law.max) ++t;
  return t;
}

int64_t largest_in_tile(const RowLaw& law,
                        const float* z,
                        int64_t count,
                        float inverse_temperature) {
  int64_t i = 0;
  while (i + 1 < count && z[i] * inverse_temperature != law.max) ++i;
  return i;
}

}  // namespace banyan::kernels
