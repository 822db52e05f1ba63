// How the passes of a step lay out their samples: whether prefixes are shared, and how blocks are
// cut. Decided once per rollout batch, so that scoring and updating agree (specification A14).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/parallel/collectives.h"
#include "banyan/train/context_group.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

class SharingObserver;

struct Layout {
  bool share = true;
  trie::CostModel cost;  // calibrated at the start of the run, or the unitless default
  SharingObserver* observer = nullptr;     // watches the passes; may be null
  parallel::Collectives* ranks = nullptr;  // that share the samples of a pass; null: this one alone
  // Those of them that hold the same experts, where a model's experts are dealt out.
  parallel::Collectives* expert_ranks = nullptr;
  // Ranks that compute this one's samples together, and each of `ranks` has such a group; and all
  // of them, who add their gradients. Null: `ranks`.
  ContextGroup context = {};
  parallel::Collectives* gradient_ranks = nullptr;

  parallel::Collectives* adding() const {
    return gradient_ranks != nullptr ? gradient_ranks : ranks;
  }
};

// Limits of one block, from the micro-batch keys of a role.
struct BlockLimits {
  int64_t max_tokens = 0;   // 0: none
  int64_t max_samples = 0;  // 0: none
};
BlockLimits block_limits(const ActorConfig& actor);
BlockLimits block_limits(const CriticConfig& critic);

// How samples are merged and cut under the keys of `sharing` alone. Throws [config] for an unknown
// word.
trie::PlanOptions plan_options(const SharingConfig& sharing);

// Limits of tokens are those of one rank.
trie::PlanOptions plan_options(const SharingConfig& sharing,
                               const Layout& layout,
                               const BlockLimits& limits,
                               bool for_backward);

// The plan of a pass under plan_options; of a rank without samples an empty one.
trie::Plan plan_of(const std::vector<Sample>& samples,
                   const trie::PlanOptions& options,
                   const Layout& layout);

// sharing.mode: on, off, or what the cost model says of these samples (auto): share if it saves at
// least `margin` of the time.
bool decide_sharing(const SharingConfig& sharing,
                    double margin,
                    const trie::CostModel& cost,
                    const BlockLimits& limits,
                    const std::vector<Sample>& samples);

}  // namespace banyan::train
