#include "banyan/rollout/control/together.h"

#include <algorithm>
#include <vector>

namespace banyan::rollout {

int64_t least_together(const models::CausalLM& model, int64_t value) {
  parallel::Collectives* ranks = ranks_together(model);
  if (ranks == nullptr) return value;
  const std::vector<double> all = ranks->all_gather_number(static_cast<double>(value));
  return static_cast<int64_t>(*std::min_element(all.begin(), all.end()));
}

double of_first_together(const models::CausalLM& model, double value) {
  parallel::Collectives* ranks = ranks_together(model);
  return ranks == nullptr ? value : ranks->all_gather_number(value)[0];
}

int64_t own_kv_heads(const models::CausalLM& model) {
  const parallel::TensorParallel* tensor = model.tensor();
  return tensor != nullptr ? tensor->kv_heads().count : model.shape().kv_heads;
}

int64_t most_kv_heads(const models::CausalLM& model) {
  const parallel::Collectives* ranks = ranks_together(model);
  if (ranks == nullptr) return model.shape().kv_heads;
  return std::max<int64_t>(1, parallel::even_part(model.shape().kv_heads, ranks->size(), 0).count);
}

}  // namespace banyan::rollout
