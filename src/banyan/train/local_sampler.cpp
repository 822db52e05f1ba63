#include "banyan/train/local_sampler.h"

#include "banyan/core/error.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/train/clock.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/run_support.h"

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
  if (fsdp_ != nullptr || actor_.tensor() != nullptr || !holds_all(actor_)) {
    whole_ = load_rollout_model(config, /*with_values=*/fsdp_ == nullptr);
  }
  if (fsdp_ != nullptr) filled_ = std::make_unique<FilledWeights>(*whole_);
  if (config.reward_model.enable) reward_model_ = std::make_unique<RewardModel>(config);
}

void LocalSampler::begin(SamplerState from, const std::string& ahead) {
  unfinished_ = std::move(from.unfinished);
  if (!ahead.empty()) host_.say("the checkpoint's batch that was generated ahead is drawn again");
  generator_ = make_generator(config_, factory_, whole_ ? *whole_ : actor_);
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
          groups_.world.is_alone() ? nullptr : &groups_.world};
}

// Whoever generates learns of new weights once, before it generates with them.
void LocalSampler::hand_over_weights(int64_t version) {
  const bool is_empty = filled_ && !filled_->are_there();
  if (handed_over_ == version && !is_empty) return;
  Clock clock;
  if (filled_) {
    filled_->fill(*fsdp_);
  } else if (whole_) {
    parallel::WeightView(actor_.params(), groups_)
        .each([&](const std::string& name, const at::Tensor& whole) {
          whole_->params().at(name).master.copy_(whole);
        });
    whole_->params().repack();
  }
  generator_->weights_changed(version);
  handed_over_ = version;
  hand_over_seconds_ += clock.lap();
}

// A second copy of the weights that only generates takes no memory in an update.
void LocalSampler::rest() {
  const RolloutConfig& rollout = config_.rollout;
  if (filled_ && rollout.enable_sleep_mode && rollout.free_cache_engine) filled_->drop();
}

}  // namespace banyan::train
