// Figures of "rollout_corr/" on the two laws, l = l_old, u = l_old - l_roll:
//   kl = mean(l_roll - l_old), k3_kl = mean(exp(u) - u - 1), chi2_token = mean(exp(2 u)) - 1 over
//   tokens; per sequence, then the mean over sequences: log_ppl = -mean l, ppl = exp of it for both
//   laws, log_ppl_diff = mean l_roll - mean l_old with its absolute value, maximum and minimum,
//   ppl_ratio = exp of it, chi2_seq = exp(2 sum u) - 1
// Exponents are clamped to +-20 before they are doubled (T30).
#include <algorithm>
#include <cmath>

#include "banyan/algo/detail/correction_rules.h"

namespace banyan::algo::detail {

double clamp20(double x) { return std::clamp(x, -20.0, 20.0); }

void law_metrics(const PerToken& old_log_prob,
                 const PerToken& rollout_log_prob,
                 MetricMap& metrics) {
  MetricMap out;
  for (size_t i = 0; i < old_log_prob.size(); ++i) {
    const auto n = static_cast<double>(old_log_prob[i].size());
    if (n == 0.0) continue;
    double old_sum = 0, rollout_sum = 0, gap = 0, k3 = 0, chi2 = 0;
    for (size_t t = 0; t < old_log_prob[i].size(); ++t) {
      const double u = old_log_prob[i][t] - rollout_log_prob[i][t];
      const double ratio = std::exp(clamp20(u));
      old_sum += old_log_prob[i][t];
      rollout_sum += rollout_log_prob[i][t];
      gap += u;
      k3 += ratio - clamp20(u) - 1.0;
      chi2 += ratio * ratio - 1.0;
    }
    const double diff = (rollout_sum - old_sum) / n;
    const double sequence_ratio = std::exp(clamp20(gap));
    MetricMap one;
    one["kl"] = mean_of(-gap, n);
    one["k3_kl"] = mean_of(k3, n);
    one["chi2_token"] = mean_of(chi2, n);
    one["training_log_ppl"] = mean_of(-old_sum / n, 1.0);
    one["training_ppl"] = mean_of(std::exp(-old_sum / n), 1.0);
    one["rollout_log_ppl"] = mean_of(-rollout_sum / n, 1.0);
    one["rollout_ppl"] = mean_of(std::exp(-rollout_sum / n), 1.0);
    one["log_ppl_diff"] = mean_of(diff, 1.0);
    one["log_ppl_abs_diff"] = mean_of(std::abs(diff), 1.0);
    one["log_ppl_diff_max"] = max_of(diff);
    one["log_ppl_diff_min"] = min_of(diff);
    one["ppl_ratio"] = mean_of(std::exp(clamp20(diff)), 1.0);
    one["chi2_seq"] = mean_of(sequence_ratio * sequence_ratio - 1.0, 1.0);
    merge(one, out);
  }
  merge(out, metrics);
}

}  // namespace banyan::algo::detail
