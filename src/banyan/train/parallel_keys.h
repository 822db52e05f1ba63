// What the keys say about how the processes of a run work together.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/layout.h"

namespace banyan::train {

// The sizes of the axes; those of the actor hold for the run.
parallel::MeshShape mesh_shape(const Config& config);

// Throws [config] naming the key of what does not go together.
void check_parallel(const Config& config);
// The same of a run that was started with these groups.
void check_parallel(const Config& config, const parallel::Groups& groups);

// Runs `check`; what it refuses is refused with `ours` in the place of `theirs`, pair by pair. For
// rules that name the actor's keys and hold for other models too.
struct KeyName {
  std::string theirs;
  std::string ours;
};
void under_names(const std::vector<KeyName>& names, const std::function<void()>& check);
// Of the sizes that a reference ("actor_rollout_ref.ref.") or critic ("critic.") has beside the
// actor.
std::vector<KeyName> names_of_role(const std::string& role);

// Cuts each layer of what is loaded over the ranks of `groups`.
void set_cut(bool sequence_parallel, parallel::Groups& groups, models::LoadOptions& options);

// Throws [config] if the model cannot be cut as the rollout's own keys say, on ranks that generate
// and on those that only train. Reads config.json alone.
void check_rollout_model(const Config& config, const parallel::Groups& groups);
// Cuts a model that only generates so.
void set_rollout_cut(parallel::Groups& groups, models::LoadOptions& options);

// True where the rollout can read the weights of `actor` in place: its keys cut a model as they
// lie.
bool lies_as_rollout(const models::CausalLM& actor, const parallel::Groups& groups);

// Which ranks share the samples of a pass, which compute it together, and who adds gradients.
void set_ranks(const Config& config, parallel::Groups& groups, Layout& layout);

// Throws [config] if the heads of a model (its part on this rank) cannot be dealt out over
// ulysses_sequence_parallel_size ranks. Reads no weights.
void check_heads(const Config& config, parallel::Groups& groups);
// The same of one model, loaded as `options` say, with the key's name.
void check_heads(const char* key,
                 int64_t ranks,
                 const std::string& directory,
                 models::LoadOptions options,
                 parallel::Groups& groups);
// How the layers of the run's models are dealt out in stages, and that for what is loaded.
parallel::StageSplit stage_split(const Config& config);
void set_stages(const parallel::StageSplit& split,
                parallel::Groups& groups,
                models::LoadOptions& options);

// Deals out the experts of what is loaded, and cuts them.
void set_experts(const Config& config, parallel::Groups& groups, models::LoadOptions& options);

}  // namespace banyan::train
