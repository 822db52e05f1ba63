#include "banyan/train/parallel_keys.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/parallel/tensor_parallel.h"
#include "banyan/train/critic.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/trainer_mode.h"
#include "banyan/train/ulysses.h"

namespace banyan::train {
namespace {

constexpr const char* kTensor = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size";
constexpr const char* kContext = "actor_rollout_ref.actor.megatron.context_parallel_size";
constexpr const char* kUlysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size";
constexpr const char* kPipeline = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size";
constexpr const char* kRollout = "actor_rollout_ref.rollout.";
constexpr const char* kExperts = "actor_rollout_ref.actor.megatron.expert_model_parallel_size";
constexpr const char* kExpertTensor =
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size";

void check_role(const std::string& key, int64_t size, int64_t actor) {
  BANYAN_CHECK(size == actor,
               "[config] ",
               key,
               ": wanted the actor's (",
               actor,
               "), got ",
               size,
               ": the models of a run are cut alike");
}

int64_t chunks(const std::optional<int64_t>& value) { return value.value_or(1); }

// Reference and critic are cut as the actor is.
void check_roles(const Config& config) {
  struct Size {
    const char* name;
    int64_t MegatronConfig::* of;
    int64_t Config::* of_reference;
  };
  const MegatronConfig& actor = config.actor.megatron;
  const MegatronConfig& critic = config.critic.megatron;
  const std::string reference = "actor_rollout_ref.ref.megatron.";
  for (const Size& size : {Size{"tensor_model_parallel_size",
                                &MegatronConfig::tensor_model_parallel_size,
                                &Config::ref_tensor_model_parallel_size},
                           {"context_parallel_size",
                            &MegatronConfig::context_parallel_size,
                            &Config::ref_context_parallel_size},
                           {"pipeline_model_parallel_size",
                            &MegatronConfig::pipeline_model_parallel_size,
                            &Config::ref_pipeline_model_parallel_size},
                           {"expert_model_parallel_size",
                            &MegatronConfig::expert_model_parallel_size,
                            &Config::ref_expert_model_parallel_size}}) {
    check_role(reference + size.name, config.*size.of_reference, actor.*size.of);
    if (wants_critic(config)) {
      check_role(std::string("critic.megatron.") + size.name, critic.*size.of, actor.*size.of);
    }
  }
  const int64_t own = chunks(actor.virtual_pipeline_model_parallel_size);
  const int64_t heads = config.actor.ulysses_sequence_parallel_size;
  check_role(reference + "virtual_pipeline_model_parallel_size",
             chunks(config.ref_virtual_pipeline_model_parallel_size),
             own);
  check_role("actor_rollout_ref.ref.ulysses_sequence_parallel_size",
             config.ref_ulysses_sequence_parallel_size,
             heads);
  if (!wants_critic(config)) return;
  check_role("critic.megatron.virtual_pipeline_model_parallel_size",
             chunks(critic.virtual_pipeline_model_parallel_size),
             own);
  check_role(
      "critic.ulysses_sequence_parallel_size", config.critic.ulysses_sequence_parallel_size, heads);
}

// Processes that compute the passes over equal samples together.
int64_t context_size(const Config& config) {
  return std::max(config.actor.megatron.context_parallel_size,
                  config.actor.ulysses_sequence_parallel_size);
}

void check_context(const Config& config) {
  const int64_t ranges = config.actor.megatron.context_parallel_size;
  const int64_t heads = config.actor.ulysses_sequence_parallel_size;
  BANYAN_CHECK(ranges == 1 || heads == 1,
               "[config] ",
               kUlysses,
               ": wanted 1 with ",
               kContext,
               "=",
               ranges,
               ", got ",
               heads,
               ": passes are shared out by tokens or by heads, not by both");
}

// Processes that hold a part of each expert.
int64_t expert_tensor_size(const MegatronConfig& megatron) {
  return megatron.expert_tensor_parallel_size.value_or(megatron.tensor_model_parallel_size);
}

bool cuts_experts_apart(const Config& config) {
  return expert_tensor_size(config.actor.megatron) !=
         config.actor.megatron.tensor_model_parallel_size;
}

void check_experts(const Config& config) {
  const MegatronConfig& actor = config.actor.megatron;
  const int64_t own = expert_tensor_size(actor);
  check_role("actor_rollout_ref.ref.megatron.expert_tensor_parallel_size",
             config.ref_expert_tensor_parallel_size.value_or(config.ref_tensor_model_parallel_size),
             own);
  if (wants_critic(config)) {
    check_role("critic.megatron.expert_tensor_parallel_size",
               expert_tensor_size(config.critic.megatron),
               own);
  }
  // Stages go in step with those that share their experts, and with those that share their passes:
  // one must be a part of the other.
  if (actor.pipeline_model_parallel_size == 1) return;
  const int64_t sharing = own * actor.expert_model_parallel_size;
  const int64_t equal = actor.tensor_model_parallel_size * context_size(config);
  BANYAN_CHECK(sharing % equal == 0 || equal % sharing == 0,
               "[config] ",
               kExperts,
               " x expert_tensor_parallel_size: wanted a divisor or a multiple of tensor x context "
               "parallel size (",
               equal,
               ") with ",
               kPipeline,
               "=",
               actor.pipeline_model_parallel_size,
               ", got ",
               sharing);
}

// verl's rule for the ranks of one replica of the rollout.
void check_rollout(const Config& config) {
  const RolloutConfig& rollout = config.rollout;
  const int64_t ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size;
  BANYAN_CHECK(rollout.expert_parallel_size == 1 || rollout.expert_parallel_size == ranks,
               "[config] ",
               kRollout,
               "expert_parallel_size: wanted 1, or tensor_model_parallel_size times "
               "data_parallel_size (",
               ranks,
               "), got ",
               rollout.expert_parallel_size);
  BANYAN_CHECK(rollout.data_parallel_size == 1 || rollout.expert_parallel_size > 1,
               "[config] ",
               kRollout,
               "data_parallel_size: wanted 1 with expert_parallel_size=1, got ",
               rollout.data_parallel_size,
               ": without experts to share, every tensor_model_parallel_size ranks generate by "
               "themselves");
}

}  // namespace

parallel::MeshShape mesh_shape(const Config& config) {
  return {.tp = config.actor.megatron.tensor_model_parallel_size,
          .cp = context_size(config),
          .ep = config.actor.megatron.expert_model_parallel_size,
          .pp = config.actor.megatron.pipeline_model_parallel_size,
          .etp = expert_tensor_size(config.actor.megatron),
          .shard = std::max<int64_t>(0, config.actor.fsdp.fsdp_size),
          .rollout = num_rollout_ranks(config),
          .rollout_tp = config.rollout.tensor_model_parallel_size,
          .rollout_ep = config.rollout.expert_parallel_size};
}

void check_parallel(const Config& config) {
  check_rollout(config);
  check_context(config);
  check_roles(config);
  parallel::check_split(stage_split(config));
  check_experts(config);
  const int64_t tensor = config.actor.megatron.tensor_model_parallel_size;
  const int64_t pipeline = config.actor.megatron.pipeline_model_parallel_size;
  const int64_t experts = config.actor.megatron.expert_model_parallel_size;
  const int64_t parts = expert_tensor_size(config.actor.megatron);
  const std::pair<const char*, int64_t> cuts[] = {
      {kTensor, tensor}, {kPipeline, pipeline}, {kExperts, experts}, {kExpertTensor, parts}};
  const auto* found = std::find_if(
      std::begin(cuts), std::end(cuts), [](const auto& each) { return each.second > 1; });
  if (found == std::end(cuts)) return;
  const char* cut = found->first;
  const int64_t size = found->second;
  const auto check_whole = [&](const char* key, const Sharding& sharding) {
    BANYAN_CHECK(!sharding.cuts_weights,
                 "[config] ",
                 key,
                 ": wanted megatron or null with ",
                 cut,
                 "=",
                 size,
                 ", got fsdp: weights are cut in one way");
  };
  check_whole("actor_rollout_ref.actor.strategy", actor_sharding(config));
  check_whole("actor_rollout_ref.ref.strategy", reference_sharding(config));
  if (wants_critic(config)) check_whole("critic.strategy", critic_sharding(config));
  BANYAN_CHECK(config.sharing.verify == "off",
               "[config] actor_rollout_ref.sharing.verify: wanted off with ",
               cut,
               "=",
               size,
               ", got ",
               config.sharing.verify,
               ": each rank sees a part of the gradients");
}

void check_parallel(const Config& config, const parallel::Groups& groups) {
  const int64_t rollout = num_rollout_ranks(config);
  BANYAN_CHECK(rollout == 0 || !groups.world.is_first() || groups.hand_over.size() == rollout + 1,
               "[config] actor_rollout_ref.rollout.nnodes x n_gpus_per_node: wanted fewer than the "
               "processes of the run (",
               groups.world.size(),
               "), got ",
               rollout,
               "; start them with torchrun --nproc-per-node N -m banyan.trainer.main_ppo ...");
  const auto check_size = [&](const char* key, const parallel::Collectives& ranks, int64_t size) {
    BANYAN_CHECK(ranks.size() == size,
                 "[config] ",
                 key,
                 ": wanted a divisor of the number of processes (",
                 groups.world.size(),
                 "), got ",
                 size,
                 "; start them with torchrun --nproc-per-node N -m banyan.trainer.main_ppo ...");
  };
  const int64_t tensor = config.actor.megatron.tensor_model_parallel_size;
  check_size(kTensor, groups.tensor, tensor);
  const int64_t context = context_size(config);
  BANYAN_CHECK(groups.context.size() == context,
               "[config] ",
               config.actor.ulysses_sequence_parallel_size > 1 ? kUlysses : kContext,
               ": wanted a divisor of the number of processes (",
               groups.world.size(),
               ") over ",
               kTensor,
               " (",
               tensor,
               "), got ",
               context);
  check_size(kPipeline, groups.pipeline, config.actor.megatron.pipeline_model_parallel_size);
  check_size(kExperts, groups.expert, config.actor.megatron.expert_model_parallel_size);
  check_size(kExpertTensor, groups.expert_tensor, expert_tensor_size(config.actor.megatron));
}

void under_names(const std::vector<KeyName>& names, const std::function<void()>& check) {
  try {
    check();
  } catch (const std::invalid_argument& error) {
    std::string text = error.what();
    for (const KeyName& name : names) {
      for (size_t at = text.find(name.theirs); at != std::string::npos;
           at = text.find(name.theirs, at + name.ours.size())) {
        text.replace(at, name.theirs.size(), name.ours);
      }
    }
    BANYAN_CHECK(false, text);
  }
}

std::vector<KeyName> names_of_role(const std::string& role) {
  std::vector<KeyName> names;
  for (const char* size : {"tensor_model_parallel_size",
                           "pipeline_model_parallel_size",
                           "expert_model_parallel_size",
                           "expert_tensor_parallel_size"}) {
    const std::string key = std::string("megatron.") + size;
    names.push_back({"actor_rollout_ref.actor." + key, role + key});
  }
  return names;
}

void set_rollout_cut(parallel::Groups& groups, models::LoadOptions& options) {
  if (!groups.rollout_tensor.is_alone()) options.tensor = &groups.rollout_tensor;
  if (groups.rollout_experts.is_alone()) return;
  options.experts = &groups.rollout_experts;
  if (groups.rollout_tensor.is_alone()) return;
  options.expert_tensor = &groups.self;  // whole experts
  options.expert_model = &groups.rollout_experts;
}

// Groups of neighbours of equal size are equal groups. Where training cuts experts, it deals them
// out over ranks that are none.
bool lies_as_rollout(const models::CausalLM& actor, const parallel::Groups& groups) {
  const bool is_apart =
      actor.shape().num_experts > 0 && groups.expert_tensor.size() != groups.tensor.size();
  if (is_apart && !groups.expert_tensor.is_alone()) return false;
  const int64_t tensor = actor.tensor() != nullptr ? actor.tensor()->ranks().size() : 1;
  const int64_t experts = actor.expert_ranks() != nullptr ? actor.expert_ranks()->size() : 1;
  return actor.stage() == nullptr && tensor == groups.rollout_tensor.size() &&
         experts == groups.rollout_experts.size() &&
         (experts == 1 || groups.expert_tensor.is_alone());
}

void set_experts(const Config& config, parallel::Groups& groups, models::LoadOptions& options) {
  options.experts = &groups.expert;
  if (!cuts_experts_apart(config)) return;
  options.expert_tensor = &groups.expert_tensor;
  options.expert_model = &groups.expert_model;
}

void set_cut(bool sequence_parallel, parallel::Groups& groups, models::LoadOptions& options) {
  if (groups.tensor.is_alone()) return;
  options.tensor = &groups.tensor;
  options.sequence_parallel = sequence_parallel;
}

void set_ranks(const Config& config, parallel::Groups& groups, Layout& layout) {
  layout.ranks = &groups.data;
  layout.expert_ranks = &groups.expert_data;
  if (groups.context.is_alone()) return;
  layout.context = {
      &groups.context,
      config.actor.ulysses_sequence_parallel_size > 1 ? ContextKind::kHeads : ContextKind::kRanges};
  layout.gradient_ranks = &parallel::gradient_ranks(groups);
}

void check_rollout_model(const Config& config, const parallel::Groups& groups) {
  const RolloutConfig& rollout = config.rollout;
  models::CutSizes sizes{.tensor = groups.rollout_tensor.size(),
                         .experts = groups.rollout_experts.size()};
  if (num_rollout_ranks(config) > 0) {  // which those that train are not among
    sizes = {.tensor = rollout.tensor_model_parallel_size, .experts = rollout.expert_parallel_size};
  }
  if (sizes.tensor == 1 && sizes.experts == 1) return;
  if (sizes.experts > 1) sizes.expert_tensor = 1;  // whole experts
  const std::string keys = kRollout;
  under_names(
      {{kExperts, keys + "expert_parallel_size"}, {kTensor, keys + "tensor_model_parallel_size"}},
      [&] { models::check_cut(config.model.path, sizes); });
}

void check_heads(const char* key,
                 int64_t ranks,
                 const std::string& directory,
                 models::LoadOptions options,
                 parallel::Groups& groups) {
  options.with_backward = false;
  options.with_values = false;
  set_cut(/*sequence_parallel=*/false, groups, options);
  const auto outline = models::load_model(directory, options);
  const parallel::TensorParallel* tensor = outline->tensor();
  const models::ModelShape& shape = outline->shape();
  check_ulysses(key,
                ranks,
                tensor != nullptr ? tensor->heads().count : shape.heads,
                tensor != nullptr ? tensor->kv_heads().count : shape.kv_heads);
}

void check_heads(const Config& config, parallel::Groups& groups) {
  const int64_t ranks = config.actor.ulysses_sequence_parallel_size;
  if (ranks == 1) return;
  const auto check = [&](const std::string& directory, models::HeadKind head) {
    models::LoadOptions options{{.dtype = at::kFloat}, /*with_backward=*/false};
    options.head = head;
    check_heads(kUlysses, ranks, directory, options, groups);
  };
  check(config.model.path, models::HeadKind::kVocabulary);
  if (config.actor.use_kl_loss || config.algorithm.use_kl_in_reward) {
    under_names(names_of_role("actor_rollout_ref.ref."), [&] {
      check(config.ref_model_path.value_or(config.model.path), models::HeadKind::kVocabulary);
    });
  }
  if (wants_critic(config)) {
    under_names(names_of_role("critic."), [&] {
      check(config.critic_model_path.value_or(config.model.path), models::HeadKind::kValue);
    });
  }
}

parallel::StageSplit stage_split(const Config& config) {
  const MegatronConfig& megatron = config.actor.megatron;
  const StagesConfig& stages = config.actor.stages;
  return {.pipeline_model_parallel_size = megatron.pipeline_model_parallel_size,
          .virtual_pipeline_model_parallel_size = megatron.virtual_pipeline_model_parallel_size,
          .num_layers_per_virtual_pipeline_stage = stages.num_layers_per_virtual_pipeline_stage,
          .num_layers_in_first_pipeline_stage = stages.num_layers_in_first_pipeline_stage,
          .num_layers_in_last_pipeline_stage = stages.num_layers_in_last_pipeline_stage,
          .account_for_embedding_in_pipeline_split = stages.account_for_embedding_in_pipeline_split,
          .account_for_loss_in_pipeline_split = stages.account_for_loss_in_pipeline_split};
}

void set_stages(const parallel::StageSplit& split,
                parallel::Groups& groups,
                models::LoadOptions& options) {
  if (groups.pipeline.is_alone()) return;
  options.pipeline = &groups.pipeline;
  options.embedding = &groups.embedding;
  options.split = split;
}

}  // namespace banyan::train
