#include "banyan/train/parallel_keys.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/train/critic.h"
#include "banyan/train/sharded_model.h"

namespace banyan::train {
namespace {

constexpr const char* kTensor = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size";

void check_role(const char* key, int64_t size, int64_t actor) {
  BANYAN_CHECK(size == actor,
               "[config] ",
               key,
               ": wanted the actor's (",
               actor,
               "), got ",
               size,
               ": the models of a run are cut alike");
}

}  // namespace

parallel::MeshShape mesh_shape(const Config& config) {
  return {.tp = config.actor.megatron.tensor_model_parallel_size,
          .shard = std::max<int64_t>(0, config.actor.fsdp.fsdp_size)};
}

void check_parallel(const Config& config) {
  const int64_t tensor = config.actor.megatron.tensor_model_parallel_size;
  check_role("actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
             config.ref_tensor_model_parallel_size,
             tensor);
  if (wants_critic(config)) {
    check_role("critic.megatron.tensor_model_parallel_size",
               config.critic.megatron.tensor_model_parallel_size,
               tensor);
  }
  if (tensor > 1) {
    const auto check_whole = [&](const char* key, const Sharding& sharding) {
      BANYAN_CHECK(!sharding.cuts_weights,
                   "[config] ",
                   key,
                   ": wanted megatron or null with ",
                   kTensor,
                   "=",
                   tensor,
                   ", got fsdp: weights are cut in one way");
    };
    check_whole("actor_rollout_ref.actor.strategy", actor_sharding(config));
    check_whole("actor_rollout_ref.ref.strategy", reference_sharding(config));
    check_whole("critic.strategy", critic_sharding(config));
  }
  BANYAN_CHECK(tensor == 1 || config.sharing.verify == "off",
               "[config] actor_rollout_ref.sharing.verify: wanted off with ",
               kTensor,
               "=",
               tensor,
               ", got ",
               config.sharing.verify,
               ": each rank sees a part of the gradients");
}

void check_parallel(const Config& config, const parallel::Groups& groups) {
  const int64_t tensor = config.actor.megatron.tensor_model_parallel_size;
  BANYAN_CHECK(groups.tensor.size() == tensor,
               "[config] ",
               kTensor,
               ": wanted a divisor of the number of processes (",
               groups.world.size(),
               "), got ",
               tensor,
               "; start them with torchrun --nproc-per-node N -m banyan.trainer.main_ppo ...");
}

void set_cut(bool sequence_parallel, parallel::Groups& groups, models::LoadOptions& options) {
  if (groups.tensor.is_alone()) return;
  options.tensor = &groups.tensor;
  options.sequence_parallel = sequence_parallel;
}

}  // namespace banyan::train
