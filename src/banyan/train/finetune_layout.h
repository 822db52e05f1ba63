// How the processes of a run on given text work together. The keys of `engine` are those of the
// actor of reinforcement learning under other names, and so are the rules between them
// (train/parallel_keys.h).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "banyan/core/finetune_config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/parallel/fsdp.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/layout.h"

namespace banyan::train {

// Runs `body`; what it refuses by a key of the actor is refused by the key of this run.
void under_finetune_names(const std::function<void()>& body);

// The sizes of the axes.
parallel::MeshShape finetune_mesh(const FinetuneConfig& config);

// Throws [config] naming the actor's key of what does not go together, or not with the processes of
// `groups` or the heads of the models. Reads no weights.
void check_finetune_layout(const FinetuneConfig& config, parallel::Groups& groups);

// Who shares the samples of a batch, who computes them together, and who adds gradients.
Layout finetune_layout(const FinetuneConfig& config,
                       const trie::CostModel& cost,
                       parallel::Groups& groups);

// The part of the model in `path` that this rank holds; `fsdp` becomes its cut, or null.
std::unique_ptr<models::CausalLM> load_finetuned(const FinetuneConfig& config,
                                                 const std::string& path,
                                                 models::LoadOptions options,
                                                 parallel::Groups& groups,
                                                 std::unique_ptr<parallel::Fsdp>& fsdp);

}  // namespace banyan::train
