#include "banyan/bench/rollout_limit.h"

#include <algorithm>

namespace banyan::bench {

RolloutCost least_cost(const ModelCost& model,
                       const RolloutWork& work,
                       double flops_per_s,
                       double bytes_per_s) {
  const auto sequences = static_cast<double>(work.sequences());
  double prompt_tokens = 0.0;
  double prompt_pairs = 0.0;
  for (const int64_t tokens : work.prompt_tokens) {
    const auto p = static_cast<double>(tokens);
    prompt_tokens += p;
    prompt_pairs += p * (p + 1.0) / 2.0;
  }
  const auto least = [&](double bytes, double flops) {
    return std::max(bytes / bytes_per_s, flops / flops_per_s);
  };
  RolloutCost cost;
  for (int64_t r = 1; r <= work.new_tokens; ++r) {
    const double own = sequences * static_cast<double>(r);
    const double pairs = static_cast<double>(work.n) * prompt_tokens + own;
    const double bytes = model.weight_bytes + model.kv_bytes_per_token * (prompt_tokens + own);
    const double flops =
        2.0 * model.weight_numbers * sequences + model.attention_flops_per_pair * pairs;
    cost.bytes += bytes;
    cost.flops += flops;
    cost.decode_seconds += least(bytes, flops);
  }
  cost.prompt_seconds = least(
      model.weight_bytes + model.kv_bytes_per_token * prompt_tokens,
      2.0 * model.weight_numbers * prompt_tokens + model.attention_flops_per_pair * prompt_pairs);
  return cost;
}

}  // namespace banyan::bench
