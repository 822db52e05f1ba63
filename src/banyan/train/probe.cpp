#include "banyan/train/probe.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/sum.h>

namespace banyan::train {

ProbeResult probe_pass(models::CausalLM& model, const trie::Plan& plan) {
  const int64_t scored = static_cast<int64_t>(plan.logical.edge.size());
  const double weight = scored > 0 ? -1.0 / static_cast<double>(scored) : 0.0;
  ProbeResult result;
  result.stats = walk(model,
                      plan,
                      /*head=*/{},
                      LossScope::kSample,
                      [&](const std::vector<int32_t>& /*samples*/, const TokenOutputs& outputs) {
                        result.loss += weight * outputs.value.sum(at::kDouble).item<double>();
                        return TokenGradients{at::full_like(outputs.value, weight), {}};
                      });
  return result;
}

}  // namespace banyan::train
