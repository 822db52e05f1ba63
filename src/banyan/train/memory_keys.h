// The keys that save memory, as the parts that act on them take them.
#pragma once

#include <string>

#include "banyan/core/config.h"
#include "banyan/nn/recompute.h"

namespace banyan::train {

// What the update of a role drops and computes again. Megatron's keys decide where
// recompute_granularity is given, with Megatron's rules; else `checkpointing`, which is every layer
// by itself (full, uniform, 1). `node` is the keys' node, for messages. Throws [config].
nn::Recompute recompute_of(bool checkpointing,
                           const RecomputeConfig& recompute,
                           const std::string& node);

// Of a run's actor and critic.
nn::Recompute actor_recompute(const Config& config);
nn::Recompute critic_recompute(const Config& config);

}  // namespace banyan::train
