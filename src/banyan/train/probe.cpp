#include "banyan/train/probe.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/sum.h>

#include <map>

#include "banyan/train/block_pass.h"
#include "banyan/train/clock.h"

namespace banyan::train {

ProbeResult probe_pass(models::CausalLM& model, const trie::Plan& plan) {
  const int64_t scored = static_cast<int64_t>(plan.logical.edge.size());
  const double weight = scored > 0 ? -1.0 / static_cast<double>(scored) : 0.0;
  ProbeResult result;
  std::map<int32_t, BlockForward> in_flight;
  Clock clock;
  for (const trie::Entry& entry : plan.entries) {
    const trie::Block& block = plan.blocks[entry.block];
    BlockForward& state = in_flight[entry.block];
    switch (entry.action) {
      case trie::Action::kForward:
        state = forward_block(model, block, 1.0, /*with_entropy=*/false, /*keep=*/true);
        result.forward_seconds += clock.lap();
        break;
      case trie::Action::kLoss:
      case trie::Action::kRecompute:
        break;
      case trie::Action::kBackward: {
        const BlockTokens tokens = block_tokens(plan, block);
        const at::Tensor log_prob = logical_log_prob(state, tokens);
        result.loss += weight * log_prob.sum(at::kDouble).item<double>();
        const at::Tensor gradient = at::full_like(log_prob, weight);
        backward_block(model, block, tokens, std::move(state), gradient, /*grad_entropy=*/{}, 1.0);
        in_flight.erase(entry.block);
        result.backward_seconds += clock.lap();
        break;
      }
    }
  }
  return result;
}

}  // namespace banyan::train
