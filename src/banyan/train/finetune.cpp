#include "banyan/train/finetune.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/checkpoint/folder.h"
#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/feature/running.h"
#include "banyan/optim/adamw.h"
#include "banyan/optim/schedule.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/clock.h"
#include "banyan/train/finetune_exchange.h"
#include "banyan/train/finetune_layout.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/objective.h"
#include "banyan/train/offload.h"
#include "banyan/train/run_support.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/token_budget.h"
#include "banyan/train/walk.h"

namespace banyan::train {
namespace {

int64_t total_steps(const FinetuneConfig& config) {
  const FinetuneTrainerConfig& trainer = config.trainer;
  return trainer.total_training_steps.value_or(
      trainer.total_epochs * (config.num_train_rows / config.data.train_batch_size));
}

// Results of several batches as one: means stay means over all that they counted.
void add(const BatchResult& from, BatchResult& to) {
  const double weight = from.weight + to.weight;
  to.loss = weight > 0.0 ? (to.loss * to.weight + from.loss * from.weight) / weight : 0.0;
  to.weight = weight;
  algo::merge(from.metrics, to.metrics);
}

class FinetuneRun {
 public:
  FinetuneRun(const FinetuneConfig& config, FinetuneHost& host, parallel::Groups& groups)
      : config_(config),
        host_(host),
        groups_(groups),
        ranks_(groups.world),
        num_steps_(total_steps(config)) {
    set_up_process();
    schedule_ = optim::schedule_from(config.optim, num_steps_);
    // An unknown schedule fails here, before a model loads.
    if (optim::learning_rate(schedule_, 0) == 0.0) {  // T38
      host_.say(
          "the learning rate of the first step is 0: it changes nothing (lr, lr_warmup_steps)");
    }
    check_finetune_layout(config, groups);
    recompute();
    std::vector<std::string> notes;
    model_ = load_finetuned(
        config, config.model.path, finetune_load_options(config, &notes), groups, fsdp_);
    model_->set_recompute(recompute());
    optimizer_ = make_optimizer(config.optim, *model_, groups);
    resume();
    if (step_ == 0) {
      for (const std::string& note : notes) host_.say(note);
    }
    trie::CostModel cost;
    if (config.sharing.mode == "auto") {
      cost = calibrated_cost(
          *model_, [&] { return load_whole(); }, config.trainer.default_local_dir, ranks_);
    }
    if (!config_.data.max_token_len_per_gpu && config.sharing.max_tokens_per_block == 0) {
      config_.data.max_token_len_per_gpu = chosen_token_budget(
          config.trainer.default_local_dir,
          "model",
          "data.max_token_len_per_gpu",
          *model_,
          {.free_bytes = free_bytes_of_rank(model_->options().device, ranks_.size()),
           .reserved_bytes = coming_bytes(*model_, step_ == 0)},
          host_,
          ranks_);
    }
    const OffloadOptions away = offload_of(config.engine, config.megatron, config.offload_dir);
    if (wants_folder(away)) host_.say(kWantsFolder);
    offload(away, *model_, optimizer_.get());
    objective_ =
        make_objective(config_, finetune_layout(config, cost, groups), *model_, host_, groups);
  }

  TrainSummary run() {
    summary_.first_step = step_;
    if (step_ == 0 && config_.trainer.val_before_train && config_.num_val_rows > 0) {
      Metrics metrics;
      validate(metrics);
      host_.log(step_, metrics);
    }
    while (step_ < num_steps_) {
      if (ranks_.any(host_.should_stop())) {
        summary_.stopped_early = true;
        break;
      }
      step();
    }
    summary_.last_step = step_;
    if (step_ > summary_.first_step && saved_step_ != step_) save();
    return summary_;
  }

 private:
  nn::Recompute recompute() const {
    return recompute_of(config_.model.enable_gradient_checkpointing,
                        config_.megatron.recompute,
                        "engine.override_transformer_config");
  }

  std::unique_ptr<models::CausalLM> load_whole() const {
    auto whole =
        models::load_model(config_.model.path, finetune_load_options(config_, /*notes=*/nullptr));
    whole->set_recompute(recompute());
    return whole;
  }

  void resume() {
    const FinetuneTrainerConfig& trainer = config_.trainer;
    const std::string path = find_checkpoint(
        trainer.resume_mode, trainer.resume_from_path, trainer.default_local_dir, host_, ranks_);
    if (path.empty()) return;
    const checkpoint::TrainerState state =
        checkpoint::load(path, *model_, *optimizer_, {.verified = trainer.resume_mode == "auto"});
    step_ = saved_step_ = state.global_step;
    skipped_in_a_row_ = state.skipped_in_a_row;
    summary_.checkpoint = path;
    host_.load_state(state.extra);
    host_.say("resumed from " + path + " after step " + std::to_string(step_));
  }

  void step() {
    Clock whole, stage;
    const std::map<std::string, int64_t> sent_before = parallel::sent_bytes(groups_);
    const std::vector<int64_t> rows = host_.next_rows(config_.data.train_batch_size);
    model_->params().ensure_grads();
    model_->params().zero_grads();
    reset_peak_resident();
    const BatchResult result = gradients(rows);
    const double lr = optim::learning_rate(schedule_, step_);
    const AppliedGradients applied =
        apply_gradients(config_.optim, lr, result.loss, *model_, *optimizer_);
    skipped_in_a_row_ = applied.skipped ? skipped_in_a_row_ + 1 : 0;
    ++step_;
    Metrics metrics = step_metrics(result);
    metrics["train/lr"] = lr;
    metrics["train/grad_norm"] = applied.grad_norm;
    metrics["train/skipped_updates"] = applied.skipped ? 1.0 : 0.0;
    metrics["timing_s/update"] = stage.lap();
    metrics["timing_s/step"] = whole.lap();
    metrics["perf/time_per_step"] = metrics["timing_s/step"];
    metrics["perf/throughput"] = static_cast<double>(result.logical_tokens) /
                                 std::max(1e-9, metrics["timing_s/step"]) /
                                 static_cast<double>(ranks_.size());
    for (const auto& [what, bytes] : parallel::sent_bytes_since(sent_before, groups_)) {
      metrics["comm/" + what + "_bytes"] = static_cast<double>(bytes);
    }
    finish(metrics);
  }

  // The batch's figures; its gradients, or over several ranks the sums of what the optimizer owns.
  BatchResult gradients(const std::vector<int64_t>& rows) {
    const feature::Running running;
    std::vector<Example> examples = host_.examples(rows, /*validation=*/false);
    const double weight = objective_->weight(examples);
    RowsOfRank own = spread_rows(rows, std::move(examples), groups_.data);
    BatchResult result;
    if (takes_part(own)) result = objective_->train(own.rows, std::move(own.examples), weight);
    model_->params().finish_grads();
    result = merge_batch(result, weight, groups_.data);
    optimizer_->reduce_gradients();
    return result;
  }

  bool takes_part(const RowsOfRank& own) const {
    return !own.rows.empty() || walks_together(*model_);
  }

  // Validates where due, logs, saves where due, and stops a run whose updates have become
  // non-finite. A step is logged before it is saved: a run that is killed in between logs it again.
  void finish(Metrics& metrics) {
    if (save_seconds_ > 0.0 && saved_step_ == step_ - 1) {
      metrics["timing_s/save_checkpoint"] = save_seconds_;  // of the step before
    }
    Clock clock;
    if (config_.num_val_rows > 0 &&
        (step_ == num_steps_ || due(config_.trainer.test_freq, step_))) {
      validate(metrics);
      metrics["timing_s/testing"] = clock.lap();
    }
    host_.log(step_, metrics);
    if (due(config_.trainer.save_freq, step_)) {
      clock.lap();
      save();
      save_seconds_ = clock.lap();
    }
    check_skipped(skipped_in_a_row_, config_.max_nonfinite_steps);
  }

  Metrics step_metrics(const BatchResult& result) {
    for (const std::string& warning : result.warnings) {
      if (said_.insert(warning).second) host_.say(warning);
    }
    Metrics metrics;
    metrics["train/loss"] = result.loss;
    metrics[config_.preference ? "train/num_pairs" : "train/num_tokens"] = result.weight;
    for (const auto& [name, metric] : result.metrics) metrics[name] = algo::value_of(metric);
    metrics["trie/logical_tokens"] = static_cast<double>(result.logical_tokens);
    metrics["trie/unique_tokens"] = static_cast<double>(result.unique_tokens);
    metrics["trie/computed_tokens"] = static_cast<double>(result.computed_tokens);
    metrics["trie/ratio"] = static_cast<double>(result.logical_tokens) /
                            static_cast<double>(std::max<int64_t>(1, result.unique_tokens));
    metrics["perf/total_num_tokens"] = static_cast<double>(result.logical_tokens);
    metrics["perf/update_peak_bytes"] = static_cast<double>(peak_resident_bytes());
    metrics["training/global_step"] = static_cast<double>(step_);
    const int64_t per_epoch =
        std::max<int64_t>(1, config_.num_train_rows / config_.data.train_batch_size);
    metrics["training/epoch"] = static_cast<double>((step_ - 1) / per_epoch);
    return metrics;
  }

  void validate(Metrics& metrics) {
    BatchResult all;
    const int64_t size = config_.data.train_batch_size;
    for (int64_t begin = 0; begin < config_.num_val_rows; begin += size) {
      std::vector<int64_t> rows(std::min(size, config_.num_val_rows - begin));
      std::iota(rows.begin(), rows.end(), begin);
      std::vector<Example> examples = host_.examples(rows, /*validation=*/true);
      const double weight = objective_->weight(examples);
      RowsOfRank own = spread_rows(rows, std::move(examples), groups_.data);
      BatchResult result;
      if (takes_part(own)) result = objective_->score(own.rows, std::move(own.examples), weight);
      add(merge_batch(result, weight, groups_.data), all);
    }
    metrics["val/loss"] = all.loss;
    for (const auto& [name, metric] : all.metrics) metrics["val/" + name] = algo::value_of(metric);
  }

  void save() {
    const FinetuneTrainerConfig& trainer = config_.trainer;
    checkpoint::TrainerState state;
    state.global_step = step_;
    state.skipped_in_a_row = skipped_in_a_row_;
    state.extra = host_.save_state();
    optimizer_->gather_moments();
    checkpoint::save(trainer.default_local_dir,
                     *model_,
                     *optimizer_,
                     state,
                     config_.model.path,
                     trainer.max_ckpt_to_keep.value_or(0),
                     /*critic=*/nullptr,
                     ranks_.is_alone() ? nullptr : &groups_);
    optimizer_->take_moments();
    model_->params().rest();
    saved_step_ = step_;
    summary_.checkpoint = checkpoint::step_path(trainer.default_local_dir, step_);
  }

  FinetuneConfig config_;  // with the token budget that was chosen
  FinetuneHost& host_;
  parallel::Groups& groups_;
  parallel::Collectives& ranks_;  // all of them
  int64_t num_steps_ = 0;
  int64_t step_ = 0;
  int64_t saved_step_ = -1;
  int64_t skipped_in_a_row_ = 0;
  double save_seconds_ = 0.0;
  optim::ScheduleOptions schedule_;
  std::unique_ptr<models::CausalLM> model_;
  std::unique_ptr<parallel::Fsdp> fsdp_;  // null: the weights are whole
  std::unique_ptr<optim::AdamW> optimizer_;
  std::unique_ptr<Objective> objective_;
  std::set<std::string> said_;
  TrainSummary summary_;
};

}  // namespace

TrainSummary finetune(const FinetuneConfig& config, FinetuneHost& host, parallel::Groups* groups) {
  parallel::Groups alone;
  TrainSummary summary;
  under_finetune_names(
      [&] { summary = FinetuneRun(config, host, groups != nullptr ? *groups : alone).run(); });
  return summary;
}

}  // namespace banyan::train
