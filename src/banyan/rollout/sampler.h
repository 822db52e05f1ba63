// Draws tokens from rows of logits (rollout specification 3.2, 3.4): divide by T, top-k, top-p
// (each on what the one before left), then the inverse of the cumulative distribution over
// ascending token ids with one uniform number. Greedy takes the largest logit, the lower id of
// equal ones. Sums run over fixed tiles of the vocabulary in a fixed order, so a draw depends on
// the row and its number alone. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/truncation.h"

namespace banyan::rollout {

// Temperatures below are greedy.
inline constexpr double kGreedyTemperature = 1e-5;

struct SamplerOptions {
  double temperature = 1.0;
  double top_p = 1.0;  // 1: off
  int32_t top_k = -1;  // <= 0: off
  bool greedy() const { return temperature < kGreedyTemperature; }
};

// One row at a time: load it, then draw from it as often as wanted. Not for use by two threads at
// once.
class Sampler {
 public:
  Sampler(const SamplerOptions& options, int32_t vocab);

  // Reads logits [vocab] fp32, borrowed until the last draw. False if one of them is NaN or +inf,
  // or all are -inf.
  bool load(const float* logits);
  // Token of the uniform number u in [0, 1).
  int32_t draw(float u) const;
  // log of the share of the softmax that top-k and top-p kept; 0 where nothing was cut off.
  float log_kept_share() const { return log_kept_share_; }

 private:
  SamplerOptions options_;
  int32_t vocab_;
  float inverse_t_;
  const float* logits_ = nullptr;
  float max_ = 0.0f;
  int32_t argmax_ = 0;
  Cut cut_;
  std::vector<float> tile_mass_;  // of the survivors
  double total_ = 0.0;            // their sum, in tile order
  float log_kept_share_ = 0.0f;
  TruncationScratch scratch_;
};

}  // namespace banyan::rollout
