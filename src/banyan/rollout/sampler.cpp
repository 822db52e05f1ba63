#include "banyan/rollout/sampler.h"

#include <algorithm>
#include <cmath>

#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kTile = 256;  // tokens of one partial sum
constexpr int32_t kLanes = 16;  // of one partial sum, added in ascending order at its end

BANYAN_MULTIVERSION float row_max(const float* z, int32_t vocab) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  int32_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = z[i + lane] > lanes[lane] ? z[i + lane] : lanes[lane];
    }
  }
  float best = lanes[0];
  for (const float value : lanes) best = value > best ? value : best;
  for (; i < vocab; ++i) best = z[i] > best ? z[i] : best;
  return best;
}

// tile_mass[t] = sum of e^((z - max) / T) over the survivors of tile t.
BANYAN_MULTIVERSION void tile_masses(
    const float* z, int32_t vocab, Cut cut, float max, float inverse_t, float* tile_mass) {
  for (int32_t begin = 0; begin < vocab; begin += kTile) {
    const int32_t end = std::min(vocab, begin + kTile);
    float lanes[kLanes] = {};
    int32_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int32_t lane = 0; lane < kLanes; ++lane) {
        const float x = z[i + lane];
        const bool dropped = (x < cut.logit) | ((x == cut.logit) & (i + lane > cut.id));
        const float mass = kernels::exp_f32((x - max) * inverse_t);
        lanes[lane] += dropped ? 0.0f : mass;  // NaN is never dropped, so it shows in the sum
      }
    }
    float sum = 0.0f;
    for (const float lane : lanes) sum += lane;
    for (; i < end; ++i) {
      const bool dropped = (z[i] < cut.logit) | ((z[i] == cut.logit) & (i > cut.id));
      sum += dropped ? 0.0f : kernels::exp_f32((z[i] - max) * inverse_t);
    }
    tile_mass[begin / kTile] = sum;
  }
}

// mass[i] = e^((z[i] - max) / T) for a survivor, else 0; ids first_id, first_id + 1, ...
BANYAN_MULTIVERSION void token_masses(const float* z,
                                      int32_t first_id,
                                      int32_t count,
                                      Cut cut,
                                      float max,
                                      float inverse_t,
                                      float* mass) {
  for (int32_t i = 0; i < count; ++i) {
    const bool dropped = (z[i] < cut.logit) | ((z[i] == cut.logit) & (first_id + i > cut.id));
    mass[i] = dropped ? 0.0f : kernels::exp_f32((z[i] - max) * inverse_t);
  }
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int32_t vocab)
    : options_(options),
      vocab_(vocab),
      inverse_t_(options.greedy() ? 1.0f : static_cast<float>(1.0 / options.temperature)),
      tile_mass_((vocab + kTile - 1) / kTile) {}

bool Sampler::load(const float* logits) {
  logits_ = logits;
  max_ = row_max(logits, vocab_);
  cut_ = {};
  log_kept_share_ = 0.0f;
  const bool greedy = options_.greedy();
  const bool truncate = !greedy && (options_.top_k > 0 || options_.top_p < 1.0);
  const auto sum_tiles = [&] {
    tile_masses(logits, vocab_, cut_, max_, inverse_t_, tile_mass_.data());
    total_ = 0.0;
    for (const float mass : tile_mass_) total_ += mass;
    return std::isfinite(total_) && total_ > 0.0;
  };
  if (!sum_tiles()) return false;
  if (greedy) {
    argmax_ = static_cast<int32_t>(std::find(logits, logits + vocab_, max_) - logits);
    return true;
  }
  if (!truncate) return true;
  const double whole = total_;
  if (options_.top_k > 0) cut_ = top_k_cut(logits, vocab_, options_.top_k, scratch_);
  if (options_.top_p < 1.0) {
    cut_ = top_p_cut(logits, vocab_, cut_, max_, inverse_t_, options_.top_p, scratch_);
  }
  if (!sum_tiles()) return false;
  log_kept_share_ = static_cast<float>(std::log(total_ / whole));
  return true;
}

int32_t Sampler::draw(float u) const {
  if (options_.greedy()) return argmax_;
  const double target = static_cast<double>(u) * total_;
  size_t tile = 0;
  double start = 0.0;  // mass of the tiles before `tile`
  double end = 0.0;
  for (size_t t = 0; t < tile_mass_.size() && end <= target; ++t) {
    if (tile_mass_[t] == 0.0f) continue;
    tile = t;
    start = end;
    end += tile_mass_[t];
  }
  const int32_t first = static_cast<int32_t>(tile) * kTile;
  const int32_t count = std::min(kTile, vocab_ - first);
  float mass[kTile];
  token_masses(logits_ + first, first, count, cut_, max_, inverse_t_, mass);
  int32_t chosen =
      first;  // the last token with mass, should rounding keep the sum below the target
  for (int32_t i = 0; i < count && start <= target; ++i) {
    if (mass[i] == 0.0f) continue;
    chosen = first + i;
    start += mass[i];
  }
  return chosen;
}

}  // namespace banyan::rollout
