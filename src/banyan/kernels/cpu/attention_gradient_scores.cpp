#include "banyan/kernels/cpu/attention_gradient_scores.h"

#include <algorithm>
#include <bit>

#include "banyan/kernels/cpu/lanes.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

// bf16 of a number to nearest even, in the upper half of the word (the lower half is not cleared).
BANYAN_INLINE uint32_t rounded_word(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

BANYAN_INLINE uint32_t pair_word(uint32_t even, uint32_t odd) {
  return even >> 16 | (odd & 0xffff0000u);
}

}  // namespace

// Sixteen lanes and one tree.
BANYAN_MULTIVERSION
float row_dot(int64_t head_dim, const uint16_t* __restrict a, const uint16_t* __restrict b) {
  Lanes lanes;
  const int64_t whole = head_dim / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      lanes.at[i] = fma(bf16_to_f32(a[first + i]), bf16_to_f32(b[first + i]), lanes.at[i]);
    }
  }
  for (int64_t d = whole; d < head_dim; ++d) {
    lanes.at[d - whole] = fma(bf16_to_f32(a[d]), bf16_to_f32(b[d]), lanes.at[d - whole]);
  }
  return lanes.sum();
}

BANYAN_MULTIVERSION
void round_scaled(int64_t n, float scale, const float* __restrict acc, uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(acc[i] * scale);
}

BANYAN_MULTIVERSION
void round_scaled_sums(int64_t n,
                       float scale,
                       const float* __restrict acc,
                       const float* __restrict sums,
                       uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(fma(acc[i], scale, sums[i]));
}

BANYAN_MULTIVERSION
void add_scaled(int64_t n, float scale, const float* __restrict acc, float* __restrict sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] = fma(acc[i], scale, sums[i]);
}

BANYAN_MULTIVERSION
void add_values(int64_t n, const float* __restrict from, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// Two rows at a time, sixteen keys at a time. The lane numbers are data: compared with the loop
// variable, the compiler would cut the loop where a row's keys end and run both ends one by one.
BANYAN_MULTIVERSION
void gradient_score_pair(int32_t keys,
                         int32_t seen_even,
                         int32_t seen_odd,
                         float scale,
                         const float* __restrict scores,
                         const float* __restrict grad_probs,
                         const float* __restrict lse,
                         const float* __restrict delta,
                         uint32_t* __restrict prob_pairs,
                         uint32_t* __restrict grad_pairs,
                         uint16_t* __restrict grad_rows) {
  alignas(64) int32_t lane[kLanes];
  for (int32_t i = 0; i < kLanes; ++i) lane[i] = i;
  const float offset_even = -lse[0];
  const float offset_odd = -lse[1];
  const float mean_even = delta[0];
  const float mean_odd = delta[1];
  for (int32_t first = 0; first < keys; first += kLanes) {
    const float* even = scores + first;
    const float* odd = even + keys;
    const float* grad_even = grad_probs + first;
    const float* grad_odd = grad_even + keys;
    const int32_t left_even = seen_even - first;
    const int32_t left_odd = seen_odd - first;
    alignas(64) uint32_t d0[kLanes];
    alignas(64) uint32_t d1[kLanes];
    for (int32_t i = 0; i < kLanes; ++i) {
      const float p_even = exp_f32(fma(even[i], scale, offset_even));
      const float p_odd = exp_f32(fma(odd[i], scale, offset_odd));
      const uint32_t p0 = rounded_word(lane[i] < left_even ? p_even : 0.0f);
      const uint32_t p1 = rounded_word(lane[i] < left_odd ? p_odd : 0.0f);
      const float ds_even = p_even * (grad_even[i] - mean_even);
      const float ds_odd = p_odd * (grad_odd[i] - mean_odd);
      d0[i] = rounded_word(lane[i] < left_even ? ds_even : 0.0f);
      d1[i] = rounded_word(lane[i] < left_odd ? ds_odd : 0.0f);
      prob_pairs[first + i] = pair_word(p0, p1);
      grad_pairs[first + i] = pair_word(d0[i], d1[i]);
    }
    uint16_t* rows = grad_rows + first;
    for (int32_t i = 0; i < kLanes; ++i) rows[i] = static_cast<uint16_t>(d0[i] >> 16);
    for (int32_t i = 0; i < kLanes; ++i) rows[keys + i] = static_cast<uint16_t>(d1[i] >> 16);
  }
}

void gradient_scores(const ScoreTile& tile,
                     uint32_t* prob_pairs,
                     uint32_t* grad_pairs,
                     uint16_t* grad_rows) {
  const auto seen = [&](int64_t row) {
    return row < tile.rows ? static_cast<int32_t>(std::min(tile.valid, tile.first_seen + row)) : 0;
  };
  for (int64_t row = 0; row < tile.padded_rows; row += 2) {
    gradient_score_pair(static_cast<int32_t>(tile.keys),
                        seen(row),
                        seen(row + 1),
                        tile.scale,
                        tile.scores + row * tile.keys,
                        tile.grad_probs + row * tile.keys,
                        tile.lse + row,
                        tile.delta + row,
                        prob_pairs + row / 2 * tile.keys,
                        grad_pairs + row / 2 * tile.keys,
                        grad_rows + row * tile.keys);
  }
}

}  // namespace banyan::kernels
