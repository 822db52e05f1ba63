#include "banyan/train/local_sampler.h"

#include "banyan/core/error.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/train/clock.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/run_support.h"
#include "banyan/train/weight_push.h"

namespace banyan::train {

std::unique_ptr<rollout::Generator> make_generator(const Config& config,
                                                   const GeneratorFactory& factory,
                                                   models::CausalLM& model) {
  std::unique_ptr<rollout::Generator> generator =
      factory ? factory(model) : std::make_unique<rollout::Engine>(model, engine_options(config));
  BANYAN_CHECK(!config.partial_rollout || generator->can_continue(),
               "[config] banyan.partial_rollout: wanted the built-in engine, got a generator that "
               "cannot go on with a response");
  return generator;
}

LocalSampler::LocalSampler(const Config& config,
                           Host& host,
                           const GeneratorFactory& factory,
                           parallel::Groups& groups,
                           models::CausalLM& actor,
                           parallel::Fsdp* fsdp)
    : config_(config), host_(host), factory_(factory), groups_(groups), actor_(actor), fsdp_(fsdp) {
  if (fsdp_ != nullptr || !lies_as_rollout(actor_, groups)) {
    own_ = load_rollout_model(config, groups);
    filled_ = std::make_unique<FilledWeights>(*own_);
  }
  const RolloutConfig& rollout = config.rollout;
  if (groups.world.is_alone() &&
      rollout.tensor_model_parallel_size * rollout.data_parallel_size > 1) {
    host.say(
        "actor_rollout_ref.rollout.tensor_model_parallel_size and data_parallel_size: one process "
        "generates with the whole model");
  }
  if (config.reward_model.enable && groups.rollout_tensor.is_first())
    reward_model_ = std::make_unique<RewardModel>(config);
}

void LocalSampler::begin(SamplerState from, const std::string& ahead) {
  unfinished_ = std::move(from.unfinished);
  if (!ahead.empty()) host_.say("the checkpoint's batch that was generated ahead is drawn again");
  generator_ = make_generator(config_, factory_, own_ ? *own_ : actor_);
}

SampledBatch LocalSampler::batch(int64_t step) {
  hand_over_weights(step - 1);
  SampledBatch sampled = sample_batch(generation(), step, unfinished_);
  if (!sampled.end_of_data && sampled.refused.empty()) rest();
  return sampled;
}

RolloutResult LocalSampler::validation(int64_t step) {
  hand_over_weights(step);
  return run_rollout(
      generation(), {.rows = host_.validation_prompts()}, RolloutKind::kValidation, step);
}

SamplerState LocalSampler::state() { return {host_.save_state(), unfinished_}; }

bool LocalSampler::should_stop() { return groups_.world.any(host_.should_stop()); }

Generation LocalSampler::generation() {
  return {config_,
          *generator_,
          reward_model_.get(),
          host_,
          groups_.world.is_alone() ? nullptr : &groups_.world,
          groups_.rollout_tensor.is_alone() ? nullptr : &groups_.rollout_tensor,
          !groups_.rollout_experts.is_alone()};
}

// Whoever generates learns of new weights once, before it generates with them.
void LocalSampler::hand_over_weights(int64_t version) {
  const bool is_empty = filled_ && !filled_->are_there();
  if (handed_over_ == version && !is_empty) return;
  Clock clock;
  if (filled_) fill();
  generator_->weights_changed(version);
  handed_over_ = version;
  hand_over_seconds_ += clock.lap();
}

// Tensor by tensor: no rank has more than its part and one of them.
void LocalSampler::fill() {
  const bool is_cut = own_->tensor() != nullptr || own_->expert_ranks() != nullptr;
  if (fsdp_ != nullptr && !is_cut) return filled_->fill(*fsdp_);
  filled_->fill([&](const FilledWeights::Put& put) {
    if (fsdp_ == nullptr) return parallel::WeightView(actor_.params(), groups_).each(put);
    // In the type of the model, from which the same compute form comes.
    fsdp_->each(own_->options().dtype,
                [&](const Param& param, const at::Tensor& whole) { put(param.name, whole); });
  });
}

bool LocalSampler::drops_weights() const {
  return config_.rollout.enable_sleep_mode && config_.rollout.free_cache_engine;
}

// A second copy of the weights that only generates takes no memory in an update.
void LocalSampler::rest() {
  if (filled_ && drops_weights()) filled_->drop();
}

int64_t LocalSampler::coming_bytes() const {
  return filled_ && !filled_->are_there() && !drops_weights() ? filled_->num_bytes() : 0;
}

}  // namespace banyan::train
