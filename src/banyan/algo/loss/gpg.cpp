// The plain policy gradient (Chu et al., "GPG", 2025; Williams, 1992): L = -A l. No ratio, so a
// rollout correction weight applies in bypass mode as well (the `reinforce` loss of verl's bypass,
// T35).
#include <ATen/TensorOperators.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {

PolicyLossResult gpg_loss(const LossTokens& tokens,
                          const at::Tensor& log_prob,
                          const LossOptions&) {
  PolicyLossResult result;
  result.loss = -tokens.advantage * log_prob;
  return result;
}

}  // namespace banyan::algo::detail
