// The words and thresholds of rollout correction, parsed.
#pragma once

#include <string>
#include <vector>

#include "banyan/algo/correction.h"

namespace banyan::algo::detail {

enum class IsLevel : uint8_t { kOff, kToken, kSequence };

// Bounds of weights: with `zero_outside`, w = raw inside [low, high], else 0; without, min(raw,
// high).
struct IsRule {
  IsLevel level = IsLevel::kOff;
  bool zero_outside = false;
  double low = 0.0, high = 0.0;
};

enum class RsScope : uint8_t { kToken, kSequenceSum, kSequenceMean, kSequenceMax };

// A statistic passes if low <= it <= high. k1 is u itself, so that log(lo) and log(hi) bound the
// ratio training / rollout (T33).
struct RsRule {
  std::string name;  // as the user wrote it
  RsScope scope = RsScope::kToken;
  int k = 1;
  double low = 0.0, high = 0.0;
};

IsRule is_rule(const CorrectionOptions& options);
std::vector<RsRule> rs_rules(const CorrectionOptions& options);

// Metrics of "rollout_corr/" that describe the two laws: kl, perplexities, chi squared.
void law_metrics(const PerToken& old_log_prob,
                 const PerToken& rollout_log_prob,
                 MetricMap& metrics);

// The exponent of every ratio is clamped to +-20 (T30).
double clamp20(double x);

}  // namespace banyan::algo::detail
