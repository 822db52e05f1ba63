// min_p, top_k and top_p on one row of logits (rollout specification 3.2). Each keeps a prefix of
// the tokens in order (block_maxima.h), and each works on what the one before left, renormalised:
//   min_p: p >= min_p times the largest,   top_k: the first k (with ties: and all equal to the
//   k-th),   top_p: the smallest prefix whose share reaches top_p, at least one token
// Only the tokens that can survive are ever looked at one by one.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "banyan/kernels/cpu/head_draw.h"
#include "banyan/rollout/sampling/block_maxima.h"
#include "banyan/rollout/sampling/sampling_plan.h"

namespace banyan::rollout {

class Truncation {
 public:
  explicit Truncation(int32_t vocab);

  // Cuts softmax(z / T). law: of z / T, finite. z is borrowed until the next call.
  void apply(const float* z, const kernels::RowLaw& law, const SamplingPlan& plan);

  // Survivors, ids ascending.
  const std::vector<Candidate>& survivors() const { return candidates_; }
  bool survives(float logit, int32_t id) const {
    return !comes_before(last_, {.logit = logit, .id = id});
  }
  // The survivor at the uniform number u in [0, 1), by the inverse of the cumulative distribution
  // in the order of ids.
  int32_t draw(float u) const;
  // log of their share of softmax(z / T); at most 0.
  double log_kept_mass() const { return log_kept_mass_; }

 private:
  void keep_up_to(const Candidate& last);
  Candidate kth(int32_t k, bool ties);
  Candidate nucleus(double wanted, float max, float inverse_t);
  double add_masses(float max, float inverse_t);

  int32_t vocab_;
  BlockMaxima maxima_;
  Candidate last_;                     // survives, and nothing after it
  std::vector<Candidate> candidates_;  // survivors so far, ids ascending
  std::vector<float> mass_;            // e^(z / T - max) of each
  std::vector<Candidate> ordered_;     // working memory
  std::vector<double> bucket_mass_;
  double kept_ = 0.0;  // sum of mass_
  double log_kept_mass_ = 0.0;
};

}  // namespace banyan::rollout
