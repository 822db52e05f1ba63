// "variance_proxy/": how much of the gradient is signal (Li et al., "The optimal token baseline",
// 2026).
//   proxy1_signal_strength = grad_norm^2
//   proxy2_total_power     = mean over trajectories of a_i^2 W_i, a_i = mean of A over its tokens,
//                            W_i = sum of e_t, e_t = 1 - 2 p_t + q_t as in the token baseline;
//                            times the squared mean weight of the trajectory with rollout
//                            correction
//   proxy3_pure_noise      = max(0, (proxy2 - proxy1) / (S - 1)); 0 with one trajectory
//   expected_a_squared, expected_w = means of a_i^2 and W_i
// Torch-free.
#pragma once

#include "banyan/algo/advantage.h"
#include "banyan/algo/metric.h"

namespace banyan::algo {

// Rows without tokens are left out; `weight` may be empty.
MetricMap variance_proxy(const PerToken& advantage,
                         const PerToken& old_log_prob,
                         const PerToken& sum_squares,
                         const PerToken& weight,
                         double grad_norm);

}  // namespace banyan::algo
