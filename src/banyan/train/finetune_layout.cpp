#include "banyan/train/finetune_layout.h"

#include "banyan/train/memory_keys.h"
#include "banyan/train/objective.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/sharded_model.h"

namespace banyan::train {
namespace {

bool has_reference(const FinetuneConfig& config) {
  return config.preference && config.preference->objective != "reward_model" &&
         !config.preference->reference_free;
}

// The keys as those of an actor and its reference; what is not about layout has no meaning.
Config as_actor(const FinetuneConfig& config) {
  Config keys{};
  keys.model = config.model;
  ActorConfig& actor = keys.actor;
  actor.strategy = config.strategy;
  actor.fsdp = config.engine;
  actor.megatron = config.megatron;
  actor.stages = config.stages;
  actor.ulysses_sequence_parallel_size = config.ulysses_sequence_parallel_size;
  const MegatronConfig& megatron = config.megatron;
  keys.ref_tensor_model_parallel_size = megatron.tensor_model_parallel_size;
  keys.ref_sequence_parallel = megatron.sequence_parallel;
  keys.ref_context_parallel_size = megatron.context_parallel_size;
  keys.ref_ulysses_sequence_parallel_size = config.ulysses_sequence_parallel_size;
  keys.ref_pipeline_model_parallel_size = megatron.pipeline_model_parallel_size;
  keys.ref_virtual_pipeline_model_parallel_size = megatron.virtual_pipeline_model_parallel_size;
  keys.ref_expert_model_parallel_size = megatron.expert_model_parallel_size;
  keys.ref_expert_tensor_parallel_size = megatron.expert_tensor_parallel_size;
  keys.sharing = config.sharing;
  keys.sharing.verify = "off";
  keys.fsdp_reduce_each_block = config.fsdp_reduce_each_block;
  keys.critic.enable = false;
  keys.algorithm.adv_estimator = "grpo";
  keys.trainer_v1.trainer_mode = "sync";
  keys.hybrid_engine = true;
  keys.rollout.tensor_model_parallel_size = 1;  // nobody generates
  keys.rollout.data_parallel_size = 1;
  keys.rollout.expert_parallel_size = 1;
  return keys;
}

}  // namespace

void under_finetune_names(const std::function<void()>& body) {
  // The longest first.
  under_names({{"actor_rollout_ref.actor.megatron.", "engine."},
               {"actor_rollout_ref.actor.fsdp_config.", "engine."},
               {"actor_rollout_ref.actor.", "engine."},
               {"actor_rollout_ref.ref.", "engine."},
               {"actor_rollout_ref.", ""},
               {"banyan.trainer.main_ppo", "banyan.trainer.sft_trainer"}},
              body);
}

parallel::MeshShape finetune_mesh(const FinetuneConfig& config) {
  parallel::MeshShape shape = mesh_shape(as_actor(config));
  shape.finetunes = true;
  return shape;
}

void check_finetune_layout(const FinetuneConfig& config, parallel::Groups& groups) {
  const Config keys = as_actor(config);
  check_sharding(keys);
  check_parallel(keys);
  check_parallel(keys, groups);
  if (config.ulysses_sequence_parallel_size == 1) return;
  const auto check = [&](const std::string& directory) {
    check_heads("actor_rollout_ref.actor.ulysses_sequence_parallel_size",
                config.ulysses_sequence_parallel_size,
                directory,
                finetune_load_options(config, nullptr),
                groups);
  };
  check(config.model.path);
  if (has_reference(config)) check(config.preference->reference_path.value_or(config.model.path));
}

Layout finetune_layout(const FinetuneConfig& config,
                       const trie::CostModel& cost,
                       parallel::Groups& groups) {
  Layout layout{/*share=*/true, cost};
  set_ranks(as_actor(config), groups, layout);
  return layout;
}

std::unique_ptr<models::CausalLM> load_finetuned(const FinetuneConfig& config,
                                                 const std::string& path,
                                                 models::LoadOptions options,
                                                 parallel::Groups& groups,
                                                 std::unique_ptr<parallel::Fsdp>& fsdp) {
  const Config keys = as_actor(config);
  set_cut(config.megatron.sequence_parallel, groups, options);
  set_stages(stage_split(keys), groups, options);
  set_experts(keys, groups, options);
  return load_sharded(path, options, actor_sharding(keys), groups, fsdp);
}

}  // namespace banyan::train
