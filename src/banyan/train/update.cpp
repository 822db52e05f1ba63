#include "banyan/train/update.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/parallel/gradient_sum.h"
#include "banyan/parallel/pipeline_stage.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/exchange.h"
#include "banyan/train/loss_inputs.h"
#include "banyan/train/sharing_observer.h"
#include "banyan/train/spread.h"
#include "banyan/train/verify.h"

namespace banyan::train {

void add_metrics(const algo::LossMetrics& from, algo::LossMetrics& to) {
  to.loss += from.loss;
  to.pg_loss += from.pg_loss;
  to.kl_loss += from.kl_loss;
  to.entropy_loss += from.entropy_loss;
  to.clipped_tokens += from.clipped_tokens;
  to.clipped_lower_tokens += from.clipped_lower_tokens;
  to.neg_log_ratio_sum += from.neg_log_ratio_sum;
  to.entropy_sum += from.entropy_sum;
  to.max_abs_ratio_minus_one = std::max(to.max_abs_ratio_minus_one, from.max_abs_ratio_minus_one);
  algo::merge(from.extra, to.extra);
}

algo::LossOptions loss_options(const Config& config) {
  const ActorConfig& actor = config.actor;
  const PolicyLossConfig& loss = actor.policy_loss;
  algo::LossOptions options;
  options.loss_mode = loss.loss_mode;
  options.loss_agg_mode = actor.loss_agg_mode.value_or("");
  options.clip_ratio_low = actor.clip_ratio_low.value_or(actor.clip_ratio);  // T1
  options.clip_ratio_high = actor.clip_ratio_high.value_or(actor.clip_ratio);
  options.clip_ratio_c = actor.clip_ratio_c;
  options.dppo_ratio_cap = loss.dppo_ratio_cap;
  options.tau_pos = actor.tau_pos;
  options.tau_neg = actor.tau_neg;
  options.clip_cov_ratio = loss.clip_cov_ratio;
  options.clip_cov_lb = loss.clip_cov_lb;
  options.clip_cov_ub = loss.clip_cov_ub;
  options.kl_cov_ratio = loss.kl_cov_ratio;
  options.ppo_kl_coef = loss.ppo_kl_coef;
  options.dro_beta = loss.dro_beta.value_or(0.0);
  options.entropy_coeff = actor.entropy_coeff;
  options.use_kl_loss = actor.use_kl_loss;
  options.kl_loss_coef = actor.kl_loss_coef;
  options.kl_loss_type = actor.kl_loss_type;
  options.bypass_mode = config.algorithm.rollout_correction.bypass_mode;
  options.seed = actor.data_loader_seed;
  return options;
}

bool router_in_double(const Config& config) {
  const std::string dtype = config.actor.router.moe_router_dtype.value_or("fp32");
  BANYAN_CHECK(dtype == "fp32" || dtype == "fp64",
               "[config] actor_rollout_ref.actor.megatron.override_transformer_config."
               "moe_router_dtype: wanted fp32 or fp64, got ",
               dtype);
  return dtype == "fp64";
}

MiniBatchOptions actor_mini_batches(const Config& config) {
  return {.size = config.actor.ppo_mini_batch_size * config.rollout.train.n,
          .shuffle = config.actor.shuffle,
          .seed = config.actor.data_loader_seed,
          .epochs = config.actor.ppo_epochs};
}

namespace {

// True for a loss that must see all tokens of the mini-batch in one call.
bool is_whole(const algo::LossOptions& options) {
  return algo::policy_loss(options.loss_mode).scope == algo::PolicyScope::kMiniBatch;
}

// What one rank's part of a mini-batch is computed from.
struct Part {
  const std::vector<int64_t>& samples;  // of the mini-batch
  std::vector<int64_t> own;             // their places that this rank computes
  std::vector<Sample> paths;            // of those
  trie::Plan plan;
};

Part part_of(const Batch& batch,
             const std::vector<int64_t>& samples,
             const trie::PlanOptions& options,
             const Layout& layout,
             const Spread& spread) {
  const profile::Scope timed("plan");
  Part part{samples, spread.own, samples_of(batch, chosen(samples, spread.own)), {}};
  part.plan = plan_of(part.paths, options, layout);
  return part;
}

void count(const Part& part, UpdateResult& result) {
  result.logical_tokens = part.plan.num_logical;
  result.unique_tokens = part.plan.num_unique;
  result.computed_tokens = part.plan.num_computed;
  result.num_blocks = static_cast<int64_t>(part.plan.blocks.size());
  result.warnings = part.plan.warnings;
  result.log_prob.resize(part.samples.size());
}

// The loss of a mini-batch, ready to be asked for.
struct Losses {
  SampleWeights weights;
  algo::LossOptions options;
  HeadSpec head;
  std::optional<WholeLoss> whole;  // over several ranks, if it compares all tokens
};

Losses losses_of(const Config& config,
                 const Batch& batch,
                 const MiniBatch& mini_batch,
                 const Layout& layout,
                 models::CausalLM& model) {
  Losses losses;
  // Weights and normalisers are those of the whole mini-batch, on every rank.
  losses.weights = sample_weights(config, batch, mini_batch.samples, layout, model);
  losses.options = loss_options(config);
  losses.options.step = static_cast<uint64_t>(mini_batch.step);
  losses.options.mini_batch = static_cast<uint64_t>(mini_batch.number);
  // Entropies of the policy before the step come from the old-log-prob pass where there is one.
  losses.head = {.temperature = config.rollout.train.temperature,
                 .with_entropy = losses.options.entropy_coeff != 0.0 || batch.old_entropy.empty()};
  if (is_whole(losses.options) && !parallel::is_alone(layout.ranks)) {
    losses.whole = whole_loss(config,
                              batch,
                              mini_batch.samples,
                              losses.weights,
                              losses.head,
                              losses.options,
                              layout,
                              model);
  }
  return losses;
}

void walk_part(const Config& config,
               const Batch& batch,
               const Part& part,
               const Losses& losses,
               const Layout& layout,
               nn::RouterScope* routers,
               models::CausalLM& model,
               UpdateResult& result) {
  PassObserver* watching =
      prepare_pass(layout.observer,
                   {.name = "update_actor",
                    .batch_keys = {"input_ids", "position_ids", "response_mask", "advantages"},
                    .share = layout.share,
                    .native = is_native(model.options())},
                   part.paths,
                   part.plan);
  const bool at_once = is_whole(losses.options) && !losses.whole;
  result.walk = walk(
      model,
      part.plan,
      losses.head,
      at_once ? LossScope::kMiniBatch : LossScope::kSample,
      [&](const std::vector<int32_t>& planned, const TokenOutputs& outputs) {
        std::vector<int32_t> which;  // places in the mini-batch
        for (const int32_t k : planned) which.push_back(static_cast<int32_t>(part.own[k]));
        for (size_t s = 0; s < which.size(); ++s) {
          const int64_t begin = outputs.offsets[s];
          result.log_prob[which[s]] =
              outputs.value.narrow(0, begin, outputs.offsets[s + 1] - begin).clone();
        }
        if (losses.whole) return losses.whole->gradients(which);
        const algo::LossResult loss = algo::actor_loss(
            loss_tokens(config, batch, part.samples, losses.weights, which, outputs),
            losses.weights.scale,
            losses.options);
        add_metrics(loss.metrics, result.loss);
        return TokenGradients{.value = loss.grad_log_prob, .entropy = loss.grad_entropy};
      },
      watching,
      {.scope = routers, .ranks = layout.adding()},
      layout.context);
  if (!layout.context.is_alone()) merge_walk(result.walk, *layout.context.ranks);
  if (model.stage() != nullptr) merge_peaks(result.walk, model.stage()->ranks());
  finish_pass(layout.observer);
}

// The scope of the auxiliary losses is the mini-batch; nothing without experts.
std::unique_ptr<nn::RouterScope> router_scope(const Config& config,
                                              const models::ModelShape& shape) {
  if (shape.moe_layers == 0) return nullptr;
  const RouterConfig& router = config.actor.router;
  return std::make_unique<nn::RouterScope>(
      nn::RouterLosses{.balance_coef = router.moe_aux_loss_coeff.value_or(0.0),
                       .z_coef = router.moe_z_loss_coeff.value_or(0.0)},
      shape.layers,
      shape.num_experts,
      shape.experts_per_token);
}

// Gradients of this rank's part, figures of the whole mini-batch.
UpdateResult local_gradients(const Config& config,
                             const Batch& batch,
                             const MiniBatch& mini_batch,
                             const Layout& layout,
                             models::CausalLM& model) {
  Losses losses = losses_of(config, batch, mini_batch, layout, model);
  const trie::PlanOptions planning =
      plan_options(config.sharing, layout, block_limits(config.actor), /*for_backward=*/true);
  const Spread spread = spread_groups(batch, mini_batch.samples, planning, layout.ranks);
  const Part part = part_of(batch, mini_batch.samples, planning, layout, spread);

  UpdateResult result;
  result.num_tokens = losses.weights.scale.num_tokens;
  result.num_sequences = losses.weights.scale.num_sequences;
  result.dp_imbalance = spread.imbalance;
  result.correction = std::move(losses.weights.metrics);
  count(part, result);
  // The figures of a rank are added to those of the others.
  if (losses.whole && layout.ranks->is_first()) add_metrics(losses.whole->metrics, result.loss);
  model.params().ensure_grads();
  model.params().zero_grads();
  // A rank without a sample has gradients of zero, and takes part in the sums.
  const std::unique_ptr<nn::RouterScope> routers = router_scope(config, model.shape());
  if (!part.paths.empty()) {
    walk_part(config, batch, part, losses, layout, routers.get(), model, result);
  } else if (walks_together(model) || routers) {
    walk(model,
         part.plan,
         losses.head,
         LossScope::kSample,
         /*loss=*/nullptr,
         /*observer=*/nullptr,
         {.scope = routers.get(), .ranks = layout.adding()},
         layout.context);
  }
  model.params().finish_grads();
  if (routers) result.routers = routers->figures();
  if (layout.ranks != nullptr) merge_update(part.own, result, *layout.ranks);
  return result;
}

}  // namespace

UpdateResult accumulate_gradients(const Config& config,
                                  const Batch& batch,
                                  const MiniBatch& mini_batch,
                                  const Layout& layout,
                                  models::CausalLM& model) {
  UpdateResult result = local_gradients(config, batch, mini_batch, layout, model);
  // A keeper has summed them.
  if (layout.adding() != nullptr && model.params().keeper() == nullptr) {
    parallel::sum_gradients(
        model.params(), *layout.adding(), parallel::kBucketElements, layout.expert_ranks);
  }
  return result;
}

namespace {

UpdateResult verified_gradients(const Config& config,
                                const Batch& batch,
                                const MiniBatch& mini_batch,
                                const Layout& layout,
                                models::CausalLM& model) {
  UpdateResult shared = accumulate_gradients(config, batch, mini_batch, layout, model);
  ParamTable& params = model.params().owned();
  const bool in_parts = model.params().keeper() != nullptr;
  const std::vector<at::Tensor> gradients = clone_gradients(params);
  Layout without = layout;
  without.share = false;
  without.observer = nullptr;
  UpdateResult dense = accumulate_gradients(config, batch, mini_batch, without, model);
  const VerifyResult verdict = verify_gradients(gradients,
                                                shared.loss.loss,
                                                dense.loss.loss,
                                                model.options().dtype,
                                                params,
                                                in_parts ? layout.adding() : nullptr);
  UpdateResult& used = verdict.passed ? shared : dense;
  used.warnings.push_back(verdict.line());
  used.sharing_failed = !verdict.passed;
  return std::move(used);
}

}  // namespace

UpdateResult update(const Config& config,
                    const Batch& batch,
                    const MiniBatch& mini_batch,
                    const Layout& layout,
                    bool verify,
                    double lr,
                    models::CausalLM& model,
                    optim::AdamW& optimizer) {
  const profile::Scope timed("update");
  UpdateResult result;
  if (verify && layout.share) {
    result = verified_gradients(config, batch, mini_batch, layout, model);
  } else if (optimizer.is_sharded()) {
    result = local_gradients(config, batch, mini_batch, layout, model);
    optimizer.reduce_gradients();
  } else {
    result = accumulate_gradients(config, batch, mini_batch, layout, model);
  }
  const AppliedGradients applied =
      apply_gradients(config.actor.optim, lr, result.loss.loss, model, optimizer);
  result.grad_norm = applied.grad_norm;
  result.skipped = applied.skipped;
  return result;
}

}  // namespace banyan::train
