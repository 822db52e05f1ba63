#include "banyan/train/trainer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/checkpoint/folder.h"
#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/models/causal_lm.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/checks.h"
#include "banyan/train/clock.h"
#include "banyan/train/local_sampler.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/metrics.h"
#include "banyan/train/offload.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/run_support.h"
#include "banyan/train/separate_rollout.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/sharing_observer.h"
#include "banyan/train/step.h"
#include "banyan/train/token_budget.h"
#include "banyan/train/trainer_mode.h"

namespace banyan::train {
namespace {

ComputeOptions compute_options(const Config& config) {
  return banyan::compute_options(config.rollout.dtype, config.trainer.device, config.kernels);
}

// Blocks of a role are bounded by their samples, not by their tokens.
template <typename Role>
bool cuts_by_samples(const Role& role) {
  return role.ppo_micro_batch_size_per_gpu && !role.use_dynamic_bsz;
}

RankInfo rank_info(const Config& config, const parallel::Groups& groups) {
  return {
      .global_rank = groups.world.rank(),
      .tp_rank = groups.tensor.rank(),
      .tp_size = groups.tensor.size(),
      .pp_rank = groups.pipeline.rank(),
      .pp_size = groups.pipeline.size(),
      .cp_rank = groups.context.rank(),
      .cp_size = groups.context.size(),
      .sequence_parallel = !groups.tensor.is_alone() && config.actor.megatron.sequence_parallel};
}

class Run {
 public:
  Run(const Config& config,
      Host& host,
      const GeneratorFactory& make_generator,
      parallel::Groups& groups)
      : config_(config),
        host_(host),
        groups_(groups),
        ranks_(groups.world),
        observer_(config.sharing, rank_info(config, groups), [&host](const std::string& line) {
          host.say(line);
        }) {
    set_up_process();
    for (const std::string& line : check_config(config)) host_.say(line);
    check_parallel(config, groups);
    check_heads(config, groups);
    check_rollout_model(config, groups);
    num_steps_ = total_steps(config);
    schedule_ = optim::schedule_from(config.actor.optim, num_steps_);
    actor_ = load(config.model.path,
                  config.actor.megatron.sequence_parallel,
                  /*with_backward=*/true,
                  actor_sharding(config),
                  fsdp_);
    actor_->set_recompute(actor_recompute(config));
    optimizer_ = make_optimizer(config.actor.optim, *actor_, groups_);
    sampler_ = make_sampler(make_generator);
    if (config.actor.use_kl_loss || config.algorithm.use_kl_in_reward) {
      under_names(names_of_role("actor_rollout_ref.ref."), [&] {
        reference_ = load(config.ref_model_path.value_or(config.model.path),
                          config.ref_sequence_parallel,
                          /*with_backward=*/false,
                          reference_sharding(config),
                          reference_fsdp_);
      });
    }
    if (config.algorithm.use_kl_in_reward) {
      kl_controller_ = kl_controller(config.algorithm.kl_ctrl);
    }
    if (wants_critic(config)) {
      std::vector<std::string> notes;
      critic_ = std::make_unique<Critic>(config_, num_steps_, notes, groups_);
      critic_notes_ = std::move(notes);
    }
    checkpoint::TrainerState state = resume();
    if (config.sharing.mode == "auto") {
      cost_ = calibrated_cost(
          *actor_, [&] { return load_whole(); }, config.trainer.default_local_dir, ranks_);
    }
    choose_token_budgets();
    offload_memory();
    std::vector<UnfinishedGroup> unfinished;
    if (!state.unfinished.empty()) {
      unfinished = unfinished_from_json(state.unfinished, summary_.checkpoint);
    }
    sampler_->begin({state.extra, std::move(unfinished)}, state.ahead);
  }

  TrainSummary run() {
    summary_.first_step = step_;
    summary_.last_step = step_;
    if (config_.trainer.val_before_train && step_ == 0) log_validation();
    StepContext context{.config = config_,
                        .host = host_,
                        .sampler = *sampler_,
                        .actor = *actor_,
                        .optimizer = *optimizer_,
                        .schedule = schedule_,
                        .reference = reference_.get(),
                        .critic = critic_.get(),
                        .kl_controller = kl_controller_ ? &*kl_controller_ : nullptr,
                        .cost = cost_,
                        .observer = &observer_,
                        .verify = verify_schedule(config_.sharing.verify),
                        .groups = works_alone() ? nullptr : &groups_};
    while (step_ < num_steps_) {
      if (sampler_->should_stop()) {
        summary_.stopped_early = true;
        break;
      }
      if (context.groups != nullptr) context.sent_before = parallel::sent_bytes(groups_);
      const SamplerState before = sampler_->state();
      StepResult result = run_step(context, step_ + 1);
      if (!result.refused.empty()) {
        // The steps done so far are kept, and a resumed run draws this batch again.
        if (step_ > summary_.first_step && saved_step_ != step_) save(before);
        BANYAN_CHECK(false, result.refused);
      }
      if (result.end_of_data) {
        host_.say("the data ended before the last step");
        summary_.stopped_early = true;
        break;
      }
      ++step_;
      finish(result);
    }
    summary_.last_step = step_;
    if (step_ > summary_.first_step && saved_step_ != step_) save(sampler_->state());
    sampler_->end();
    return summary_;
  }

 private:
  // The part of a model that this rank holds.
  std::unique_ptr<models::CausalLM> load(const std::string& path,
                                         bool sequence_parallel,
                                         bool with_backward,
                                         const Sharding& sharding,
                                         std::unique_ptr<parallel::Fsdp>& fsdp) {
    models::LoadOptions options{compute_options(config_), with_backward};
    options.router_in_double = router_in_double(config_);
    set_cut(sequence_parallel, groups_, options);
    set_stages(stage_split(config_), groups_, options);
    set_experts(config_, groups_, options);
    return load_sharded(path, options, sharding, groups_, fsdp);
  }

  std::unique_ptr<Sampler> make_sampler(const GeneratorFactory& make_generator) {
    if (num_rollout_ranks(config_) > 0) {
      return separate_sampler(config_, host_, groups_, *actor_, fsdp_.get(), num_steps_);
    }
    return std::make_unique<LocalSampler>(
        config_, host_, make_generator, groups_, *actor_, fsdp_.get());
  }

  // Nobody else trains or generates.
  bool works_alone() const { return ranks_.is_alone() && num_rollout_ranks(config_) == 0; }

  std::unique_ptr<models::CausalLM> load_whole() const {
    auto whole = models::load_model(config_.model.path, {compute_options(config_), true});
    whole->set_recompute(actor_recompute(config_));
    return whole;
  }

  // Where no key bounds the blocks.
  void choose_token_budgets() {
    const RolloutConfig& rollout = config_.rollout;
    MemoryLeft left{.free_bytes = free_bytes_of_rank(actor_->options().device,
                                                     ranks_.size() + num_rollout_ranks(config_))};
    const bool generates = num_rollout_ranks(config_) == 0;
    if (generates && (!rollout.enable_sleep_mode || !rollout.free_cache_engine)) {
      left.reserved_bytes = static_cast<int64_t>(rollout.gpu_memory_utilization *
                                                 static_cast<double>(left.free_bytes));
    }
    left.reserved_bytes += sampler_->coming_bytes();
    left.reserved_bytes += coming_bytes(*actor_, /*with_moments=*/step_ == 0);
    if (critic_) left.reserved_bytes += coming_bytes(critic_->model(), step_ == 0);
    const auto choose = [&](const char* role,
                            const std::string& key,
                            const models::CausalLM& model,
                            bool by_samples,
                            std::optional<int64_t>& tokens) {
      if (tokens || by_samples || config_.sharing.max_tokens_per_block > 0) return;
      tokens = chosen_token_budget(config_.trainer.default_local_dir,
                                   role,
                                   key + "ppo_max_token_len_per_gpu",
                                   model,
                                   left,
                                   host_,
                                   ranks_);
    };
    choose("actor",
           "actor_rollout_ref.actor.",
           *actor_,
           cuts_by_samples(config_.actor),
           config_.actor.ppo_max_token_len_per_gpu);
    if (critic_) {
      choose("critic",
             "critic.",
             critic_->model(),
             cuts_by_samples(config_.critic),
             config_.critic.ppo_max_token_len_per_gpu);
    }
  }

  void offload_memory() {
    offload(actor_offload(config_), *actor_, optimizer_.get());
    if (critic_) offload(critic_offload(config_), critic_->model(), &critic_->optimizer());
    if (reference_) offload(reference_offload(config_), *reference_, /*optimizer=*/nullptr);
  }

  checkpoint::Critic saved_critic() {
    return {&critic_->model(), &critic_->optimizer(), critic_->config_from()};
  }

  // What the checkpoint says of the rest of the run, if there is one to go on from.
  checkpoint::TrainerState resume() {
    const TrainerConfig& trainer = config_.trainer;
    const std::string path = find_checkpoint(
        trainer.resume_mode, trainer.resume_from_path, trainer.default_local_dir, host_, ranks_);
    if (path.empty()) {
      for (const std::string& note : critic_notes_) host_.say("critic: " + note);
      return {};
    }
    const checkpoint::Critic critic = critic_ ? saved_critic() : checkpoint::Critic{};
    const checkpoint::TrainerState state = checkpoint::load(
        path,
        *actor_,
        *optimizer_,
        {.critic = critic_ ? &critic : nullptr, .verified = trainer.resume_mode == "auto"});
    step_ = state.global_step;
    saved_step_ = step_;
    skipped_in_a_row_ = state.skipped_in_a_row;
    if (kl_controller_ && state.kl_coef) kl_controller_->set_coef(*state.kl_coef);
    summary_.checkpoint = path;
    host_.load_state(state.extra);
    host_.say("resumed from " + path + " after step " + std::to_string(step_));
    return state;
  }

  void finish(StepResult& result) {
    Metrics metrics = step_metrics(config_, result, step_);
    for (const CriticUpdate& update : result.critic_updates) {
      note_update(update, critic_skipped_in_a_row_);
    }
    for (const UpdateResult& update : result.updates) note_update(update, skipped_in_a_row_);
    note_sharing(result.share);
    host_.on_samples(step_, /*validation=*/false, result.batch.trajectories, result.batch.scores);
    const bool last = step_ == num_steps_;
    metrics["timing_s/update_weights"] = sampler_->take_hand_over_seconds();
    if (save_seconds_ > 0.0 && saved_step_ == step_ - 1) {
      metrics["timing_s/save_checkpoint"] = save_seconds_;  // of the step before
    }
    Clock clock;
    if (config_.trainer.test_freq > 0 && (last || due(config_.trainer.test_freq, step_))) {
      metrics.merge(validate());
      metrics["timing_s/testing"] = clock.lap();
    }
    // A step is logged before it is saved: a run that is killed in between logs it again.
    host_.log(step_, metrics);
    if (due(config_.trainer.save_freq, step_)) {
      clock.lap();
      save(sampler_->state());
      save_seconds_ = clock.lap();
    }
    check_skipped(std::max(skipped_in_a_row_, critic_skipped_in_a_row_),
                  config_.max_nonfinite_steps);
  }

  template <typename Update>
  void note_update(const Update& update, int64_t& skipped_in_a_row) {
    for (const std::string& warning : update.warnings) host_.say(warning);
    skipped_in_a_row = update.skipped ? skipped_in_a_row + 1 : 0;
  }

  // Said when sharing.mode=auto decides otherwise than before.
  void note_sharing(bool share) {
    if (config_.sharing.mode != "auto" || share == shares_) return;
    shares_ = share;
    host_.say(share ? "prefix sharing is on again: it saves time on this batch"
                    : "prefix sharing is off for this batch: by the cost model it would not pay");
  }

  Metrics validate() {
    RolloutResult rollout = sampler_->validation(step_);
    host_.on_samples(step_, /*validation=*/true, rollout.trajectories, rollout.scores);
    return host_.validation_metrics(rollout.trajectories, rollout.scores);
  }

  void log_validation() {
    Clock clock;
    Metrics metrics = validate();
    metrics["timing_s/testing"] = clock.lap();
    host_.log(step_, metrics);
  }

  // `samples`: where they stand after step step_.
  void save(const SamplerState& samples) {
    saved_step_ = step_;
    summary_.checkpoint = checkpoint::step_path(config_.trainer.default_local_dir, step_);
    optimizer_->gather_moments();
    if (critic_) critic_->optimizer().gather_moments();
    write_checkpoint(samples);
    optimizer_->take_moments();
    actor_->params().rest();
    if (critic_) {
      critic_->optimizer().take_moments();
      critic_->model().params().rest();
    }
  }

  void write_checkpoint(const SamplerState& samples) {
    checkpoint::TrainerState state;
    state.global_step = step_;
    state.skipped_in_a_row = skipped_in_a_row_;
    state.extra = samples.position;
    if (!samples.unfinished.empty()) state.unfinished = to_json(samples.unfinished);
    state.ahead = sampler_->ahead();
    if (kl_controller_) state.kl_coef = kl_controller_->coef();
    const checkpoint::Critic critic = critic_ ? saved_critic() : checkpoint::Critic{};
    checkpoint::save(config_.trainer.default_local_dir,
                     *actor_,
                     *optimizer_,
                     state,
                     config_.model.path,
                     config_.trainer.max_actor_ckpt_to_keep.value_or(0),
                     critic_ ? &critic : nullptr,
                     works_alone() ? nullptr : &groups_);
  }

  Config config_;  // with the token budgets that were chosen
  Host& host_;
  parallel::Groups& groups_;
  parallel::Collectives& ranks_;  // all of them
  SharingObserver observer_;
  int64_t num_steps_ = 0;
  int64_t step_ = 0;
  int64_t saved_step_ = -1;
  double save_seconds_ = 0.0;
  int64_t skipped_in_a_row_ = 0;  // of the actor
  int64_t critic_skipped_in_a_row_ = 0;
  optim::ScheduleOptions schedule_;
  std::unique_ptr<models::CausalLM> actor_;
  std::unique_ptr<parallel::Fsdp> fsdp_;  // of the actor; null: its weights are whole
  std::unique_ptr<optim::AdamW> optimizer_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<models::CausalLM> reference_;
  std::unique_ptr<parallel::Fsdp> reference_fsdp_;
  std::optional<algo::KlController> kl_controller_;
  std::unique_ptr<Critic> critic_;
  std::vector<std::string> critic_notes_;  // about its new head, if it has one
  trie::CostModel cost_;
  bool shares_ = true;  // what sharing.mode=auto decided last
  TrainSummary summary_;
};

}  // namespace

TrainSummary train(const Config& config,
                   Host& host,
                   const GeneratorFactory& make_generator,
                   parallel::Groups* groups) {
  parallel::Groups alone;
  parallel::Groups& mine = groups != nullptr ? *groups : alone;
  if (parallel::only_generates(mine)) {
    generate_for_others(config, host, make_generator, mine);
    return {};
  }
  return Run(config, host, make_generator, mine).run();
}

}  // namespace banyan::train
