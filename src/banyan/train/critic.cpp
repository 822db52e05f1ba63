#include "banyan/train/critic.h"

#include <ATen/ops/cat.h>

#include "banyan/algo/value_loss.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/exchange.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/sharing_observer.h"
#include "banyan/train/spread.h"

namespace banyan::train {
namespace {

algo::ValueLossOptions loss_options(const CriticConfig& critic) {
  return {.cliprange_value = critic.cliprange_value,
          .loss_agg_mode = critic.loss_agg_mode.value_or("token-mean")};
}

// The tensors of some samples of the mini-batch, one after the other.
algo::ValueTokens value_tokens(const Batch& batch,
                               const std::vector<int64_t>& mini_batch,
                               const std::vector<int32_t>& samples,
                               const TokenOutputs& outputs) {
  TokenLists old_value, returns, mask;
  for (const int32_t sample : samples) {
    const int64_t i = mini_batch[sample];
    old_value.push_back(batch.value[i]);
    returns.push_back(batch.returns[i]);
    mask.push_back(loss_mask(batch, batch.keep, i));
  }
  return {.value = outputs.value,
          .old_value = at::cat(old_value),
          .returns = at::cat(returns),
          .mask = at::cat(mask),
          .offsets = outputs.offsets};
}

algo::LossScale loss_scale(const Config& config,
                           const Batch& batch,
                           const std::vector<int64_t>& mini_batch) {
  algo::LossScale scale;
  for (const int64_t i : mini_batch) {
    scale.num_tokens += static_cast<double>(batch.num_kept(i));
    scale.num_sequences += batch.num_kept(i) > 0 ? 1.0 : 0.0;  // T9
  }
  scale.sequence_norm = config.critic.loss_scale_factor.value_or(
      static_cast<double>(config.rollout.response_length));  // T10
  return scale;
}

}  // namespace

bool wants_critic(const Config& config) {
  return config.critic.enable.value_or(algo::advantage(config.algorithm.adv_estimator).needs_value);
}

void check_critic_config(const Config& config) {
  algo::check_value_loss_options(loss_options(config.critic));
}

Critic::Critic(const Config& config,
               int64_t total_steps,
               std::vector<std::string>& notes,
               parallel::Groups& groups)
    : config_(config),
      path_(config.critic_model_path.value_or(config.model.path)),
      schedule_(optim::schedule_from(config.critic.optim, total_steps)) {
  models::LoadOptions options{
      banyan::compute_options(config.rollout.dtype, config.trainer.device, config.kernels),
      /*with_backward=*/true};
  options.head = models::HeadKind::kValue;
  options.head_seed = config.critic.data_loader_seed;
  options.notes = &notes;
  set_cut(config.critic.megatron.sequence_parallel, groups, options);
  set_stages(stage_split(config), groups, options);
  set_experts(config, groups, options);
  under_names(names_of_role("critic."), [&] {
    model_ = load_sharded(path_, options, critic_sharding(config), groups, fsdp_);
  });
  model_->set_recompute(critic_recompute(config));
  optimizer_ = make_optimizer(config.critic.optim, *model_, groups);
}

double Critic::learning_rate(int64_t step) const {
  return optim::learning_rate(schedule_, step - 1);
}

TokenLists Critic::values(const Batch& batch, const Layout& layout) {
  const trie::PlanOptions options =
      plan_options(config_.sharing, layout, block_limits(config_.critic), /*for_backward=*/false);
  return score_batch_over(batch, *model_, options, {}, "values", layout).value;
}

std::vector<CriticUpdate> Critic::update(const Batch& batch, const Layout& layout, int64_t step) {
  const CriticConfig& critic = config_.critic;
  const MiniBatchOptions options{.size = critic.ppo_mini_batch_size * config_.rollout.train.n,
                                 .shuffle = critic.shuffle,
                                 .seed = critic.data_loader_seed,
                                 .epochs = critic.ppo_epochs};
  std::vector<CriticUpdate> updates;
  for (const MiniBatch& mini_batch : mini_batches(options, batch, step)) {
    CriticUpdate update =
        accumulate_value_gradients(config_, batch, mini_batch.samples, layout, *model_);
    optimizer_->reduce_gradients();
    const AppliedGradients applied =
        apply_gradients(critic.optim, learning_rate(step), update.loss, *model_, *optimizer_);
    update.grad_norm = applied.grad_norm;
    update.skipped = applied.skipped;
    updates.push_back(std::move(update));
  }
  return updates;
}

CriticUpdate accumulate_value_gradients(const Config& config,
                                        const Batch& batch,
                                        const std::vector<int64_t>& mini_batch,
                                        const Layout& layout,
                                        models::CausalLM& model) {
  const algo::LossScale scale = loss_scale(config, batch, mini_batch);
  const trie::PlanOptions planning =
      plan_options(config.sharing, layout, block_limits(config.critic), /*for_backward=*/true);
  const std::vector<int64_t> own =
      chosen(mini_batch, spread_groups(batch, mini_batch, planning, layout.ranks).own);
  const std::vector<Sample> samples = samples_of(batch, own);
  const trie::Plan plan = plan_of(samples, planning, layout);
  CriticUpdate update;
  update.num_tokens = scale.num_tokens;
  update.warnings = plan.warnings;
  model.params().ensure_grads();
  model.params().zero_grads();
  if (!samples.empty()) {
    PassObserver* watching =
        prepare_pass(layout.observer,
                     {.name = "update_critic",
                      .batch_keys = {"input_ids", "position_ids", "values", "returns"},
                      .share = layout.share,
                      .native = is_native(model.options())},
                     samples,
                     plan);
    walk(
        model,
        plan,
        {},
        LossScope::kSample,
        [&](const std::vector<int32_t>& which, const TokenOutputs& outputs) {
          const algo::ValueLossResult loss = algo::value_loss(
              value_tokens(batch, own, which, outputs), scale, loss_options(config.critic));
          update.loss += loss.loss;
          update.clipped_tokens += loss.clipped_tokens;
          update.value_sum += loss.value_sum;
          return TokenGradients{.value = loss.grad_value, .entropy = {}};
        },
        watching,
        /*routers=*/{},
        layout.context);
    finish_pass(layout.observer);
  } else if (walks_together(model)) {
    walk(model, plan, {}, LossScope::kSample, nullptr, nullptr, {}, layout.context);
  }
  model.params().finish_grads();
  if (layout.ranks != nullptr) {
    const std::vector<double> sums =
        sum_numbers({update.loss, update.clipped_tokens, update.value_sum}, *layout.ranks);
    update.loss = sums[0];
    update.clipped_tokens = sums[1];
    update.value_sum = sums[2];
  }
  return update;
}

}  // namespace banyan::train
