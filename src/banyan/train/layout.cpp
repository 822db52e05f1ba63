#include "banyan/train/layout.h"

#include "banyan/core/error.h"
#include "banyan/trie/context_plan.h"
#include "banyan/trie/sharing_choice.h"

namespace banyan::train {
namespace {

// The number of samples of a block, or its tokens where the budget is dynamic or nothing else set.
template <typename Role>
BlockLimits limits_of(const Role& role) {
  if (role.ppo_micro_batch_size_per_gpu && !role.use_dynamic_bsz) {
    return {.max_samples = *role.ppo_micro_batch_size_per_gpu};
  }
  return {.max_tokens = role.ppo_max_token_len_per_gpu.value_or(0)};
}

trie::Carry carry_of(const std::string& word) {
  if (word == "retain") return trie::Carry::kRetain;
  if (word == "recompute") return trie::Carry::kRecompute;
  if (word == "replay") return trie::Carry::kReplay;
  BANYAN_CHECK(word == "auto",
               "[config] actor_rollout_ref.sharing.carry: wanted auto, retain, recompute or "
               "replay, got '",
               word,
               "'");
  return trie::Carry::kAuto;
}

}  // namespace

BlockLimits block_limits(const ActorConfig& actor) { return limits_of(actor); }
BlockLimits block_limits(const CriticConfig& critic) { return limits_of(critic); }

trie::PlanOptions plan_options(const SharingConfig& sharing) {
  trie::PlanOptions options;
  options.build.share = sharing.mode != "off";
  options.build.min_prefix_len = static_cast<int32_t>(sharing.min_prefix_len);
  options.build.min_group_size = static_cast<int32_t>(sharing.min_group_size);
  options.carry = carry_of(sharing.carry);
  options.max_tokens_per_block = sharing.max_tokens_per_block;
  options.max_path_tokens = sharing.max_path_tokens;
  return options;
}

trie::PlanOptions plan_options(const SharingConfig& sharing,
                               const Layout& layout,
                               const BlockLimits& limits,
                               bool for_backward) {
  trie::PlanOptions options = plan_options(sharing);
  options.build.share = layout.share;
  if (options.max_tokens_per_block == 0) options.max_tokens_per_block = limits.max_tokens;
  const bool by_heads = !layout.context.is_alone() && layout.context.kind == ContextKind::kHeads;
  if (by_heads) options.max_tokens_per_block *= layout.context.ranks->size();  // shared out
  options.max_samples_per_block = limits.max_samples;
  options.for_backward = for_backward;
  options.cost = layout.cost;
  return options;
}

trie::Plan plan_of(const std::vector<Sample>& samples,
                   const trie::PlanOptions& options,
                   const Layout& layout) {
  if (!layout.context.is_alone() && layout.context.kind == ContextKind::kRanges) {
    return trie::context_plan(samples, options, layout.context.ranks->size());
  }
  return samples.empty() ? trie::Plan{} : trie::plan(samples, options);
}

bool decide_sharing(const SharingConfig& sharing,
                    double margin,
                    const trie::CostModel& cost,
                    const BlockLimits& limits,
                    const std::vector<Sample>& samples) {
  if (sharing.mode != "auto" || samples.empty()) return sharing.mode != "off";
  return trie::sharing_pays(
      samples, plan_options(sharing, {true, cost}, limits, /*for_backward=*/true), margin);
}

}  // namespace banyan::train
