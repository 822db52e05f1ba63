#include "banyan/algo/variance_proxy.h"

#include <algorithm>
#include <cmath>

#include "banyan/core/error.h"

namespace banyan::algo {

MetricMap variance_proxy(const PerToken& advantage,
                         const PerToken& old_log_prob,
                         const PerToken& sum_squares,
                         const PerToken& weight,
                         double grad_norm) {
  BANYAN_ASSERT(old_log_prob.size() == advantage.size() && sum_squares.size() == advantage.size(),
                "variance_proxy: rows differ");
  double rows = 0, total = 0, a_squared = 0, expected_w = 0;
  for (size_t i = 0; i < advantage.size(); ++i) {
    const auto n = static_cast<double>(advantage[i].size());
    if (n == 0.0) continue;
    double a = 0.0, power = 0.0, w = 0.0;
    for (size_t t = 0; t < advantage[i].size(); ++t) {
      a += advantage[i][t] / n;
      power += 1.0 - 2.0 * std::exp(old_log_prob[i][t]) + sum_squares[i][t];
      w += (weight.empty() ? 1.0 : weight[i][t]) / n;
    }
    rows += 1.0;
    a_squared += a * a;
    expected_w += power;
    total += a * a * power * (weight.empty() ? 1.0 : w * w);
  }
  const double count = std::max(1.0, rows);
  const double signal = grad_norm * grad_norm;
  MetricMap out;
  out["proxy1_signal_strength"] = mean_of(signal, 1.0);
  out["proxy2_total_power"] = mean_of(total, count);
  out["proxy3_pure_noise"] =
      mean_of(rows > 1.0 ? std::max(0.0, (total / count - signal) / (rows - 1.0)) : 0.0, 1.0);
  out["expected_a_squared"] = mean_of(a_squared, count);
  out["expected_w"] = mean_of(expected_w, count);
  return out;
}

}  // namespace banyan::algo
