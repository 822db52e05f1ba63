// top-k: the k-th largest maximum of small tiles bounds the k-th largest logit from below, so only
// the few logits above it are selected from. top-p: a histogram of the mass over (max - z) / T, in
// buckets of 1/64 nat, finds the bucket that crosses top_p; only its tokens are sorted.
#include "banyan/rollout/truncation.h"

#include <algorithm>

#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kTile = 64;
constexpr int32_t kNumBuckets = 1024;
constexpr float kBucketsPerNat = 64.0f;

bool comes_before(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

BANYAN_MULTIVERSION void tile_maxima(const float* z, int32_t vocab, float* maxima) {
  for (int32_t begin = 0; begin < vocab; begin += kTile) {
    const int32_t end = std::min(vocab, begin + kTile);
    float best = z[begin];
    for (int32_t i = begin; i < end; ++i) best = z[i] > best ? z[i] : best;
    maxima[begin / kTile] = best;
  }
}

// Bucket of a logit, ascending as the logit falls; the last one takes all that is further below.
BANYAN_INLINE int32_t bucket_of(float z, float max, float scale) {
  const float distance = (max - z) * scale;
  return distance < kNumBuckets - 1 ? static_cast<int32_t>(distance) : kNumBuckets - 1;
}

// Buckets and masses e^((z - max) / T) of one tile; a token that does not survive has mass 0.
BANYAN_MULTIVERSION void bucket_tile(const float* z,
                                     int32_t first_id,
                                     int32_t count,
                                     Cut within,
                                     float max,
                                     float inverse_t,
                                     int32_t* bucket,
                                     float* mass) {
  const float scale = inverse_t * kBucketsPerNat;
  for (int32_t i = 0; i < count; ++i) {
    const bool kept =
        (z[i] > within.logit) | ((z[i] == within.logit) & (first_id + i <= within.id));
    bucket[i] = bucket_of(z[i], max, scale);
    mass[i] = kept ? kernels::exp_f32((z[i] - max) * inverse_t) : 0.0f;
  }
}

}  // namespace

Cut top_k_cut(const float* z, int32_t vocab, int32_t k, TruncationScratch& scratch) {
  if (k >= vocab) return {};
  const int32_t num_tiles = (vocab + kTile - 1) / kTile;
  float bound = -std::numeric_limits<float>::infinity();
  if (k <= num_tiles) {
    scratch.tile_max.resize(num_tiles);
    tile_maxima(z, vocab, scratch.tile_max.data());
    const auto kth = scratch.tile_max.begin() + (k - 1);
    std::nth_element(scratch.tile_max.begin(), kth, scratch.tile_max.end(), std::greater<>());
    bound = *kth;
  }
  auto& candidates = scratch.candidates;
  candidates.clear();
  for (int32_t i = 0; i < vocab; ++i) {
    if (z[i] >= bound) candidates.emplace_back(z[i], i);
  }
  const auto kth = candidates.begin() + (k - 1);
  std::nth_element(candidates.begin(), kth, candidates.end(), comes_before);
  return {.logit = kth->first, .id = kth->second};
}

Cut top_p_cut(const float* z,
              int32_t vocab,
              const Cut& within,
              float max,
              float inverse_t,
              double top_p,
              TruncationScratch& scratch) {
  scratch.mass.assign(kNumBuckets, 0.0);
  int32_t bucket[kTile];
  float mass[kTile];
  for (int32_t begin = 0; begin < vocab; begin += kTile) {
    const int32_t count = std::min(kTile, vocab - begin);
    bucket_tile(z + begin, begin, count, within, max, inverse_t, bucket, mass);
    for (int32_t i = 0; i < count; ++i) scratch.mass[bucket[i]] += mass[i];
  }
  double total = 0.0;
  for (const double bucket_mass : scratch.mass) total += bucket_mass;
  const double wanted = top_p * total;
  double above = 0.0;  // mass of the buckets before the crossing one
  int32_t crossing = 0;
  while (crossing < kNumBuckets - 1 && above + scratch.mass[crossing] < wanted) {
    above += scratch.mass[crossing++];
  }

  auto& candidates = scratch.candidates;
  candidates.clear();
  const float scale = inverse_t * kBucketsPerNat;
  for (int32_t i = 0; i < vocab; ++i) {
    if (bucket_of(z[i], max, scale) == crossing && survives(within, z[i], i)) {
      candidates.emplace_back(z[i], i);
    }
  }
  if (candidates.empty()) return within;  // rounding: nothing below the last full bucket has mass
  std::sort(candidates.begin(), candidates.end(), comes_before);
  for (const auto& [logit, id] : candidates) {
    above += kernels::exp_f32((logit - max) * inverse_t);
    if (above >= wanted) return {.logit = logit, .id = id};
  }
  return {.logit = candidates.back().first, .id = candidates.back().second};
}

}  // namespace banyan::rollout
