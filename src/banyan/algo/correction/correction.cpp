// u = l_old - l_roll per token, clamped to +-20 in every statistic.
//   rejection   k1 = u, k2 = u^2 / 2, k3 = exp(u) - 1 - u per token; rules token_k*, and per
//   sequence
//               seq_sum_k*, seq_mean_k*, seq_max_k*; all rules must pass. k1 is bounded by
//               log lo <= u <= log hi, i.e. lo <= training / rollout <= hi like the weights (T33;
//               verl bounds the inverse ratio here).
//   weights     raw = exp(u) (token) or exp(clamp(sum of the unclamped u)) (sequence); w = min(raw,
//   C),
//               or raw inside [lo, hi] and 0 outside (IcePop)
//   order       rejection, then truncation, then w / mean over the kept tokens (token) or the
//   sequences
//               with a kept token (sequence); so w may exceed C, and the factor is reported (T34)
// Figures of w (mean, std, effective sample size) are those before normalisation over kept tokens;
// rollout_is_max, _min and the fractions are of raw over all tokens, at either level (T37).
#include "banyan/algo/correction.h"

#include <algorithm>
#include <cmath>

#include "banyan/algo/detail/correction_rules.h"

namespace banyan::algo {
namespace {

using detail::clamp20;
using detail::IsLevel;
using detail::IsRule;
using detail::RsRule;
using detail::RsScope;
using Flags = std::vector<std::vector<uint8_t>>;

// Mean, population standard deviation and range of a stream of numbers.
class Figures {
 public:
  void add(double value) {
    low_ = count_ == 0.0 ? value : std::min(low_, value);
    high_ = count_ == 0.0 ? value : std::max(high_, value);
    count_ += 1.0;
    sum_ += value;
    squares_ += value * value;
  }
  double count() const { return count_; }
  double mean() const { return count_ > 0.0 ? sum_ / count_ : 0.0; }
  double std() const {
    return count_ > 0.0 ? std::sqrt(std::max(0.0, squares_ / count_ - mean() * mean())) : 0.0;
  }
  // 1 / mean((w / mean w)^2): the effective share of the sample.
  double effective_share() const {
    return squares_ > 0.0 ? sum_ * sum_ / (count_ * squares_) : 0.0;
  }
  double max_deviation_from(double centre) const {
    return std::max(std::abs(high_ - centre), std::abs(low_ - centre));
  }
  void write(const std::string& name, MetricMap& metrics) const {
    if (count_ == 0.0) return;
    metrics[name + "_mean"] = mean_of(sum_, count_);
    metrics[name + "_std"] = mean_of(std(), 1.0);
    metrics[name + "_max"] = max_of(high_);
    metrics[name + "_min"] = min_of(low_);
  }

 private:
  double count_ = 0.0, sum_ = 0.0, squares_ = 0.0, low_ = 0.0, high_ = 0.0;
};

double statistic(int k, double u) {
  u = clamp20(u);
  if (k == 1) return u;
  return k == 2 ? 0.5 * u * u : std::exp(u) - 1.0 - u;
}

// The rule's numbers of one sequence: one per token, or one for the sequence.
std::vector<double> rule_values(const RsRule& rule, const std::vector<double>& u) {
  std::vector<double> values;
  for (const double x : u) values.push_back(statistic(rule.k, x));
  if (rule.scope == RsScope::kToken || values.empty()) return values;
  double sum = 0.0;
  for (const double value : values) sum += value;
  if (rule.scope == RsScope::kSequenceMax) return {*std::max_element(values.begin(), values.end())};
  return {rule.scope == RsScope::kSequenceSum ? sum : sum / static_cast<double>(u.size())};
}

// Applies one rule to `keep` and reports it.
void reject(const RsRule& rule, const PerToken& u, Flags& keep, MetricMap& metrics) {
  Figures all, per_sequence;
  double high = 0, low = 0, sequence_high = 0, sequence_low = 0;
  double tokens = 0, rejected = 0, sequences = 0, touched = 0;
  for (size_t i = 0; i < u.size(); ++i) {
    if (u[i].empty()) continue;
    const std::vector<double> values = rule_values(rule, u[i]);
    double sum = 0.0;
    bool is_touched = false;
    for (size_t t = 0; t < u[i].size(); ++t) {
      const double value = values.size() == 1 ? values[0] : values[t];
      const bool passes = rule.low <= value && value <= rule.high;
      rejected += passes ? 0.0 : 1.0;
      is_touched = is_touched || !passes;
      if (!passes) keep[i][t] = 0;
    }
    for (const double value : values) {
      all.add(value);
      sum += value;
      high += value > rule.high ? 1.0 : 0.0;
      low += value < rule.low ? 1.0 : 0.0;
    }
    const double mean = sum / static_cast<double>(values.size());
    per_sequence.add(mean);
    sequence_high += mean > rule.high ? 1.0 : 0.0;
    sequence_low += mean < rule.low ? 1.0 : 0.0;
    tokens += static_cast<double>(u[i].size());
    sequences += 1.0;
    touched += is_touched ? 1.0 : 0.0;
  }
  if (sequences == 0.0) return;
  const std::string name = "rollout_rs_" + rule.name;
  all.write(name, metrics);
  per_sequence.write(name + "_seq", metrics);
  metrics[name + "_fraction_high"] = mean_of(high, all.count());
  metrics[name + "_fraction_low"] = mean_of(low, all.count());
  metrics[name + "_masked_fraction"] = mean_of(rejected, tokens);
  metrics[name + "_seq_masked_fraction"] = mean_of(touched, sequences);
  metrics[name + "_seq_max_deviation"] = max_of(per_sequence.max_deviation_from(0.0));
  metrics[name + "_seq_fraction_high"] = mean_of(sequence_high, sequences);
  metrics[name + "_seq_fraction_low"] = mean_of(sequence_low, sequences);
}

void count_rejected(const Flags& keep, MetricMap& metrics) {
  double tokens = 0, rejected = 0, sequences = 0, touched = 0;
  for (const auto& row : keep) {
    if (row.empty()) continue;
    const auto dropped = static_cast<double>(std::count(row.begin(), row.end(), uint8_t{0}));
    tokens += static_cast<double>(row.size());
    rejected += dropped;
    sequences += 1.0;
    touched += dropped > 0.0 ? 1.0 : 0.0;
  }
  metrics["rollout_rs_masked_fraction"] = mean_of(rejected, tokens);
  metrics["rollout_rs_seq_masked_fraction"] = mean_of(touched, sequences);
}

double bounded(const IsRule& rule, double raw) {
  if (!rule.zero_outside) return std::min(raw, rule.high);
  return rule.low <= raw && raw <= rule.high ? raw : 0.0;
}

// Figures of the raw weights over all tokens; weights of kept tokens out, truncated.
PerToken truncated_weights(const IsRule& rule,
                           const PerToken& u,
                           const Flags& keep,
                           MetricMap& metrics) {
  PerToken weight;
  Figures raw_figures;
  double high = 0, low = 0;
  for (size_t i = 0; i < u.size(); ++i) {
    double sum = 0.0;
    for (const double x : u[i]) sum += x;
    weight.emplace_back();
    for (size_t t = 0; t < u[i].size(); ++t) {
      const double raw = std::exp(clamp20(rule.level == IsLevel::kToken ? u[i][t] : sum));
      raw_figures.add(raw);
      high += raw > rule.high ? 1.0 : 0.0;
      low += raw < rule.low ? 1.0 : 0.0;
      weight[i].push_back(keep[i][t] ? bounded(rule, raw) : 0.0);
    }
  }
  MetricMap raw;
  raw_figures.write("rollout_is", raw);
  for (const char* name : {"rollout_is_max", "rollout_is_min"}) {
    if (raw.count(name) > 0) metrics[name] = raw[name];
  }
  metrics["rollout_is_ratio_fraction_high"] = mean_of(high, raw_figures.count());
  metrics["rollout_is_ratio_fraction_low"] = mean_of(low, raw_figures.count());
  if (rule.zero_outside) {
    metrics["rollout_is_oob_ratio"] = mean_of(high + low, raw_figures.count());
  }
  return weight;
}

// Figures of w over kept tokens; returns the factor of normalisation.
double weight_figures(const IsRule& rule,
                      const PerToken& weight,
                      const Flags& keep,
                      MetricMap& metrics) {
  Figures tokens, sequences;
  double high = 0, low = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    Figures one;
    for (size_t t = 0; t < weight[i].size(); ++t) {
      if (!keep[i][t]) continue;
      tokens.add(weight[i][t]);
      one.add(weight[i][t]);
    }
    if (one.count() == 0.0) continue;
    sequences.add(one.mean());
    high += one.mean() > rule.high ? 1.0 : 0.0;
    low += one.mean() < rule.low ? 1.0 : 0.0;
  }
  MetricMap own;
  tokens.write("rollout_is", own);
  for (const char* name : {"rollout_is_mean", "rollout_is_std"}) {
    if (own.count(name) > 0) metrics[name] = own[name];
  }
  metrics["rollout_is_eff_sample_size"] = mean_of(tokens.effective_share(), 1.0);
  if (sequences.count() > 0.0) {
    sequences.write("rollout_is_seq", metrics);
    metrics["rollout_is_seq_max_deviation"] = max_of(sequences.max_deviation_from(1.0));
    metrics["rollout_is_seq_fraction_high"] = mean_of(high, sequences.count());
    metrics["rollout_is_seq_fraction_low"] = mean_of(low, sequences.count());
  }
  return rule.level == IsLevel::kToken ? tokens.mean() : sequences.mean();
}

PerToken differences(const PerToken& old_log_prob, const PerToken& rollout_log_prob) {
  BANYAN_ASSERT(old_log_prob.size() == rollout_log_prob.size(), "correction: rows differ");
  PerToken u;
  for (size_t i = 0; i < old_log_prob.size(); ++i) {
    BANYAN_ASSERT(old_log_prob[i].size() == rollout_log_prob[i].size(), "correction: row ", i);
    u.emplace_back();
    for (size_t t = 0; t < old_log_prob[i].size(); ++t) {
      u[i].push_back(old_log_prob[i][t] - rollout_log_prob[i][t]);
    }
  }
  return u;
}

}  // namespace

CorrectionResult correction(const PerToken& old_log_prob,
                            const PerToken& rollout_log_prob,
                            const CorrectionOptions& options) {
  const IsRule rule = detail::is_rule(options);
  const std::vector<RsRule> rules = detail::rs_rules(options);
  const PerToken u = differences(old_log_prob, rollout_log_prob);
  CorrectionResult result;
  detail::law_metrics(old_log_prob, rollout_log_prob, result.metrics);
  Flags keep;
  for (const auto& row : u) keep.emplace_back(row.size(), uint8_t{1});
  for (const RsRule& one : rules) reject(one, u, keep, result.metrics);
  if (!rules.empty()) count_rejected(keep, result.metrics);
  if (rule.level != IsLevel::kOff) {
    result.weight = truncated_weights(rule, u, keep, result.metrics);
    const double factor = weight_figures(rule, result.weight, keep, result.metrics);
    if (options.rollout_is_batch_normalize && factor > 0.0) {
      for (auto& row : result.weight) {
        for (double& w : row) w /= factor;
      }
      result.metrics["rollout_is_batch_norm_factor"] = mean_of(factor, 1.0);
    }
  }
  if (!rules.empty()) result.keep = std::move(keep);
  return result;
}

}  // namespace banyan::algo
