// The nucleus: a histogram of the mass over max - z / T, in buckets of 1/64 nat, finds the bucket
// that crosses top_p; only its tokens are sorted.
#include "banyan/rollout/sampling/truncation.h"

#include <algorithm>
#include <cmath>

#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kNumBuckets = 1024;
constexpr float kBucketsPerNat = 64.0f;
constexpr float kLowestFinite = std::numeric_limits<float>::lowest();

// The smallest float that is not below x.
float not_below(double x) {
  const float rounded = static_cast<float>(x);
  return rounded < x ? std::nextafter(rounded, std::numeric_limits<float>::infinity()) : rounded;
}

int32_t bucket_of(float s, float max) {
  const float distance = (max - s) * kBucketsPerNat;
  return distance < kNumBuckets - 1 ? static_cast<int32_t>(std::max(distance, 0.0f))
                                    : kNumBuckets - 1;
}

BANYAN_MULTIVERSION void masses_of(
    const Candidate* tokens, int64_t count, float max, float inverse_t, float* mass) {
  for (int64_t i = 0; i < count; ++i) {
    mass[i] = kernels::exp_f32(tokens[i].logit * inverse_t - max);
  }
}

}  // namespace

Truncation::Truncation(int32_t vocab)
    : vocab_(vocab), maxima_(vocab), bucket_mass_(kNumBuckets, 0.0) {}

void Truncation::apply(const float* z, const kernels::RowLaw& law, const SamplingPlan& plan) {
  const SamplingParams& params = plan.params;
  const float inverse_t = plan.inverse_temperature;
  const int32_t k = params.top_k > 0 && params.top_k < vocab_ ? params.top_k : 0;
  const bool nucleus_alone = params.min_p <= 0.0 && k == 0;
  maxima_.load(z);

  // Below `floor` nothing can survive.
  float floor = kLowestFinite;
  if (params.min_p > 0.0) {
    floor = std::max(floor, not_below(maxima_.max() + params.temperature * std::log(params.min_p)));
  }
  if (k > 0) floor = std::max(floor, maxima_.reached_by(k));
  if (params.top_p < 1.0 && nucleus_alone) {
    // Tokens whose mass is below (1 - top_p) / V of the whole have less than 1 - top_p together, so
    // the nucleus ends before them; half of that leaves room for rounding.
    const double share = 0.5 * (1.0 - params.top_p) * law.total / vocab_;
    floor = std::max(floor, static_cast<float>((law.max + std::log(share)) / inverse_t));
  }
  last_ = {.logit = floor, .id = std::numeric_limits<int32_t>::max()};
  candidates_.clear();
  maxima_.gather(floor, candidates_);

  if (k > 0 && static_cast<int32_t>(candidates_.size()) > k) {
    keep_up_to(kth(k, params.top_k_ties));
  }
  kept_ = add_masses(law.max, inverse_t);
  if (params.top_p < 1.0) {
    const double whole = nucleus_alone ? law.total : kept_;
    keep_up_to(nucleus(params.top_p * whole, law.max, inverse_t));
    kept_ = add_masses(law.max, inverse_t);
  }
  log_kept_mass_ = std::min(0.0, std::log(kept_ / law.total));
}

void Truncation::keep_up_to(const Candidate& last) {
  last_ = last;
  std::erase_if(candidates_, [&](const Candidate& token) { return comes_before(last, token); });
}

Candidate Truncation::kth(int32_t k, bool ties) {
  ordered_ = candidates_;
  const auto place = ordered_.begin() + (k - 1);
  std::nth_element(ordered_.begin(), place, ordered_.end(), comes_before);
  return {.logit = place->logit, .id = ties ? std::numeric_limits<int32_t>::max() : place->id};
}

// The last token of the smallest prefix whose mass reaches `wanted`.
Candidate Truncation::nucleus(double wanted, float max, float inverse_t) {
  std::fill(bucket_mass_.begin(), bucket_mass_.end(), 0.0);
  for (size_t i = 0; i < candidates_.size(); ++i) {
    bucket_mass_[bucket_of(candidates_[i].logit * inverse_t, max)] += mass_[i];
  }
  double above = 0.0;  // mass of the buckets before the crossing one
  int32_t crossing = 0;
  int32_t last_filled = kNumBuckets - 1;
  while (last_filled > 0 && bucket_mass_[last_filled] == 0.0) --last_filled;
  while (crossing < last_filled && above + bucket_mass_[crossing] < wanted) {
    above += bucket_mass_[crossing++];
  }
  ordered_.clear();
  for (const Candidate& token : candidates_) {
    if (bucket_of(token.logit * inverse_t, max) == crossing) ordered_.push_back(token);
  }
  std::sort(ordered_.begin(), ordered_.end(), comes_before);
  for (const Candidate& token : ordered_) {
    above += kernels::exp_f32(token.logit * inverse_t - max);
    if (above >= wanted) return token;
  }
  return ordered_.back();
}

double Truncation::add_masses(float max, float inverse_t) {
  mass_.resize(candidates_.size());
  masses_of(
      candidates_.data(), static_cast<int64_t>(candidates_.size()), max, inverse_t, mass_.data());
  double sum = 0.0;
  for (const float mass : mass_) sum += mass;
  return sum;
}

int32_t Truncation::draw(float u) const {
  const double target = static_cast<double>(u) * kept_;
  double before = 0.0;
  // The last token with mass, should rounding keep the sum below the target.
  int32_t chosen = candidates_.front().id;
  for (size_t i = 0; i < candidates_.size() && before <= target; ++i) {
    if (mass_[i] == 0.0f) continue;
    chosen = candidates_[i].id;
    before += mass_[i];
  }
  return chosen;
}

}  // namespace banyan::rollout
