#include "banyan/train/sharded_model.h"

#include "banyan/core/error.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/critic.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/update.h"

namespace banyan::train {
namespace {

constexpr const char* kActorStrategy = "actor_rollout_ref.actor.strategy";
constexpr const char* kActorSize = "actor_rollout_ref.actor.fsdp_config.fsdp_size";

bool cuts(const char* key, const std::optional<std::string>& strategy) {
  if (!strategy) return false;
  BANYAN_CHECK(*strategy == "fsdp" || *strategy == "fsdp2" || *strategy == "megatron",
               "[config] ",
               key,
               ": wanted fsdp, fsdp2, megatron or null, got ",
               *strategy);
  return *strategy != "megatron";
}

Sharding sharding_of(bool cuts_weights, const FsdpConfig& fsdp, const Config& config) {
  return {.cuts_weights = cuts_weights,
          .reshard_after_forward = fsdp.reshard_after_forward,
          .forward_prefetch = fsdp.forward_prefetch,
          .reduce_each_block = config.fsdp_reduce_each_block};
}

}  // namespace

Sharding actor_sharding(const Config& config) {
  return sharding_of(cuts(kActorStrategy, config.actor.strategy), config.actor.fsdp, config);
}

Sharding critic_sharding(const Config& config) {
  const std::optional<std::string>& own = config.critic.strategy;
  return sharding_of(
      cuts("critic.strategy", own ? own : config.actor.strategy), config.critic.fsdp, config);
}

Sharding reference_sharding(const Config& config) {
  const std::optional<std::string>& own = config.ref_strategy;
  return sharding_of(cuts("actor_rollout_ref.ref.strategy", own ? own : config.actor.strategy),
                     config.actor.fsdp,
                     config);
}

void check_sharding(const Config& config) {
  actor_sharding(config);
  reference_sharding(config);
  if (!wants_critic(config)) return;
  const int64_t size = config.critic.fsdp.fsdp_size;
  BANYAN_CHECK(
      !critic_sharding(config).cuts_weights || size <= 0 || size == config.actor.fsdp.fsdp_size,
      "[config] critic.fsdp.fsdp_size: wanted -1 or ",
      kActorSize,
      " (",
      config.actor.fsdp.fsdp_size,
      "), got ",
      size,
      ": the models of a run are cut over the same ranks");
}

std::unique_ptr<parallel::Fsdp> shard_model(const Sharding& sharding,
                                            bool with_gradients,
                                            models::CausalLM& model,
                                            parallel::Groups& groups) {
  if (!sharding.cuts_weights || groups.data_context.is_alone()) return nullptr;
  return std::make_unique<parallel::Fsdp>(
      model.params(),
      parallel::FsdpGroups{&groups.data_context, &groups.shard, &groups.replica},
      parallel::FsdpOptions{
          .reshard_after_forward = sharding.reshard_after_forward,
          // Ranks of a context group talk in the middle of a layer: one thread.
          .forward_prefetch = sharding.forward_prefetch && groups.context.is_alone(),
          .reduce_each_pass = sharding.reduce_each_block,
          .with_gradients = with_gradients,
          .compute = model.options().dtype},
      [&model](Pass pass) { return model.unit_uses(pass); });
}

std::unique_ptr<models::CausalLM> load_sharded(const std::string& path,
                                               models::LoadOptions options,
                                               const Sharding& sharding,
                                               parallel::Groups& groups,
                                               std::unique_ptr<parallel::Fsdp>& fsdp) {
  if (sharding.cuts_weights && !groups.data_context.is_alone()) {
    options.before_values = [&](models::CausalLM& model) {
      fsdp = shard_model(sharding, options.with_backward, model, groups);
    };
  }
  return models::load_model(path, options);
}

std::unique_ptr<models::CausalLM> load_rollout_model(const Config& config,
                                                     parallel::Groups& groups) {
  models::LoadOptions options{
      compute_options(config.rollout.dtype, config.trainer.device, config.kernels),
      /*with_backward=*/false};
  options.router_in_double = router_in_double(config);
  options.with_values = false;
  set_rollout_cut(groups, options);
  return models::load_model(config.model.path, options);
}

std::unique_ptr<optim::AdamW> make_optimizer(const OptimConfig& optim,
                                             models::CausalLM& model,
                                             parallel::Groups& groups) {
  if (model.params().keeper() == nullptr) {
    return std::make_unique<optim::AdamW>(model.params(),
                                          adamw_options(optim),
                                          &parallel::gradient_ranks(groups),
                                          &groups.model,
                                          &groups.expert_data);
  }
  auto optimizer = std::make_unique<optim::AdamW>(model.params().owned(), adamw_options(optim));
  optimizer->norm_over(&groups.shard);
  return optimizer;
}

FilledWeights::FilledWeights(models::CausalLM& model) : table_(model.params()) {
  for (int64_t unit = 0; unit < table_.num_units(); ++unit) {
    units_.emplace_back(table_, unit);
  }
  const auto element = static_cast<int64_t>(c10::elementSize(model.options().dtype));
  for (const Param& param : table_.params()) {
    num_bytes_ += param.is_form ? param.master.nbytes() : param.master.numel() * element;
  }
  drop();
}

void FilledWeights::fill(parallel::Fsdp& from) {
  from.hand_over(units_);
  are_there_ = true;
}

void FilledWeights::fill(const std::function<void(const Put&)>& each) {
  std::vector<size_t> missing;  // tensors of each unit
  for (const parallel::UnitWeights& unit : units_) missing.push_back(unit.params().size());
  each([&](const std::string& name, const at::Tensor& whole) {
    if (!table_.contains(name)) return;  // an expert that others hold
    Param& param = table_.at(name);
    parallel::UnitWeights& unit = units_.at(param.unit);
    unit.take();
    const int64_t size = param.cut.is_whole() ? 0 : param.master.size(param.cut.dim);
    param.master.copy_(param.cut.part_of(whole, size));
    if (--missing.at(param.unit) == 0) unit.complete();
  });
  for (const size_t count : missing) BANYAN_ASSERT(count == 0, "a tensor that nobody brought");
  are_there_ = true;
}

void FilledWeights::drop() {
  for (parallel::UnitWeights& unit : units_) unit.drop();
  are_there_ = false;
}

}  // namespace banyan::train
