// Models of a run whose weights lie in parts over the ranks (parallel/fsdp.h), and the model
// that generates in the place of such an actor.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"
#include "banyan/parallel/fsdp.h"
#include "banyan/parallel/groups.h"

namespace banyan::train {

// The strategy of a role: fsdp and fsdp2 cut its weights (ZeRO-3), null and megatron leave them
// whole on every rank (ZeRO-1). A role without one has the actor's.
struct Sharding {
  bool cuts_weights = false;
  bool reshard_after_forward = true;
  bool forward_prefetch = false;
  bool reduce_each_block = true;
};
Sharding actor_sharding(const Config& config);
Sharding critic_sharding(const Config& config);
Sharding reference_sharding(const Config& config);

// Throws [config] naming the key for a word or a combination that does not work.
void check_sharding(const Config& config);

// Cuts a model that is whole and equal on all ranks; null where it stays whole. A model is borrowed
// and outlives what comes back.
std::unique_ptr<parallel::Fsdp> shard_model(const Sharding& sharding,
                                            bool with_gradients,
                                            models::CausalLM& model,
                                            parallel::Groups& groups);

// load_model and shard_model in one: where it is cut, a rank never holds more than its part and one
// tensor. `fsdp` becomes the cut, or null.
std::unique_ptr<models::CausalLM> load_sharded(const std::string& path,
                                               models::LoadOptions options,
                                               const Sharding& sharding,
                                               parallel::Groups& groups,
                                               std::unique_ptr<parallel::Fsdp>& fsdp);

// A model that only generates, cut as the rollout's keys say. It waits for FilledWeights.
std::unique_ptr<models::CausalLM> load_rollout_model(const Config& config,
                                                     parallel::Groups& groups);

// Moves what this rank holds of the model.
std::unique_ptr<optim::AdamW> make_optimizer(const OptimConfig& optim,
                                             models::CausalLM& model,
                                             parallel::Groups& groups);

// The weights of a model that only generates, in the form that it computes with: filled from parts,
// and dropped while nobody generates.
class FilledWeights {
 public:
  // `model` is borrowed, and its weights go.
  explicit FilledWeights(models::CausalLM& model);
  bool are_there() const { return are_there_; }
  // What they take while they are there.
  int64_t num_bytes() const { return num_bytes_; }
  void fill(parallel::Fsdp& from);  // (all ranks) of a whole model
  // From whole tensors: `each` hands them out, all of them and in any order; the model keeps its
  // part. Units whose tensors follow one another never lie there as masters together.
  using Put = std::function<void(const std::string& name, const at::Tensor& whole)>;
  void fill(const std::function<void(const Put&)>& each);
  void drop();

 private:
  ParamTable& table_;
  std::vector<parallel::UnitWeights> units_;
  int64_t num_bytes_ = 0;
  bool are_there_ = true;
};

}  // namespace banyan::train
