// Three updates by ranks that compute each pass together, beside other forms, against those of one
// process.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "banyan/parallel/weight_view.h"
#include "banyan/testing/layout_run.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/update.h"

namespace banyan::testing::context {

using namespace train;  // what these are steps of

using Named = std::map<std::string, at::Tensor>;

inline constexpr ContextKind kRanges = ContextKind::kRanges;
inline constexpr ContextKind kHeads = ContextKind::kHeads;

struct Case {
  std::string model = testing::tiny_config_json();
  at::ScalarType dtype = at::kDouble;
  bool share = true;
  int64_t num_samples = 15;
  int64_t budget = 24;  // trunks are cut across blocks
  nn::Recompute recompute = {};
  bool with_losses = false;  // of routers
  std::string loss_mode = "vanilla";
  std::optional<int64_t> max_samples = {};
};

// How ranks work together.
struct Form {
  std::string name = "";
  int64_t size = 2;
  parallel::MeshShape mesh = {.cp = 2};
  ContextKind kind = kRanges;
  bool fsdp = false;
  Sharding sharding = {};
  bool sequence = false;
};

struct Trained {
  UpdateResult first;
  Named gradients;  // whole, of the first update
  Named changes;    // of the weights over three steps of AdamW
};

inline Config config_of(const Case& with, const Form& form) {
  Config config = testing::small_blocks();
  config.actor.ppo_max_token_len_per_gpu = with.budget;
  if (with.max_samples) {
    config.actor.ppo_max_token_len_per_gpu.reset();
    config.actor.ppo_micro_batch_size_per_gpu = with.max_samples;
  }
  config.actor.entropy_coeff = 0.01;
  config.actor.optim.clip_grad = 0.5;
  config.actor.optim.weight_decay = 0.01;
  config.actor.policy_loss.loss_mode = with.loss_mode;
  if (with.with_losses) {
    config.actor.router = {
        .moe_aux_loss_coeff = 0.1, .moe_z_loss_coeff = 0.02, .moe_router_dtype = {}};
  }
  (form.kind == kRanges ? config.actor.megatron.context_parallel_size
                        : config.actor.ulysses_sequence_parallel_size) = form.mesh.cp;
  return config;
}

// Every parameter whole, of what lies as the masters do.
inline void whole_of(models::CausalLM& model,
                     parallel::Fsdp* fsdp,
                     parallel::Groups& groups,
                     at::Tensor Param::* which,
                     Named& out) {
  std::vector<at::Tensor> own;
  for (const Param& param : model.params().owned().params()) own.push_back(param.*which);
  const auto keep = [&](const std::string& name, const at::Tensor& whole) {
    out[name] = whole.clone();
  };
  if (fsdp == nullptr) {
    parallel::WeightView(model.params(), groups).each_of(own, keep);
    return;
  }
  fsdp->each_of(own, own[0].scalar_type(), [&](const Param& param, const at::Tensor& whole) {
    keep(param.name, whole);
  });
}

inline Trained three_steps(const Case& with, const Form& form, parallel::Groups& groups) {
  const Config config = config_of(with, form);
  models::LoadOptions options{{.dtype = with.dtype}, true};
  set_cut(form.sequence, groups, options);
  const auto model = models::random_model(with.model, 3, options);
  model->set_recompute(with.recompute);
  Sharding sharding = form.sharding;
  sharding.cuts_weights = form.fsdp;
  const auto fsdp = shard_model(sharding, /*with_gradients=*/true, *model, groups);
  const auto optimizer = make_optimizer(config.actor.optim, *model, groups);
  const Batch batch = testing::batch_of_five();
  MiniBatch mini_batch = all_of(batch);
  mini_batch.samples.resize(with.num_samples);
  Layout layout{with.share, {}};
  set_ranks(config, groups, layout);
  Trained out;
  Named before;
  whole_of(*model, fsdp.get(), groups, &Param::master, before);
  if (!fsdp) {
    accumulate_gradients(config, batch, mini_batch, layout, *model);
    whole_of(*model, nullptr, groups, &Param::grad, out.gradients);
  }
  for (int step = 0; step < 3; ++step) {
    UpdateResult result =
        update(config, batch, mini_batch, layout, /*verify=*/false, 1e-3, *model, *optimizer);
    if (step > 0) continue;
    out.first = std::move(result);
    if (fsdp) whole_of(*model, fsdp.get(), groups, &Param::grad, out.gradients);
  }
  whole_of(*model, fsdp.get(), groups, &Param::master, out.changes);
  for (auto& [name, weight] : out.changes) weight = weight.sub(before.at(name));
  return out;
}

inline Trained alone(const Case& with) {
  parallel::Groups groups;
  return three_steps(with, {.mesh = {}}, groups);
}

inline void expect_near(const Named& a, const Named& b, double bound, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : b) {
    EXPECT_LE(relative(a.at(name), tensor), bound) << what << " " << name;
  }
}

inline void expect_equals_one(const Case& with, const Form& form, const Trained& one) {
  const bool wide = with.dtype == at::kDouble;
  const double bound = wide ? 1e-10 : 1e-5;
  const std::string what = form.name + (with.share ? ", shared" : ", dense");
  testing::run_mesh(form.size, form.mesh, [&](parallel::Groups& groups) {
    const Trained mine = three_steps(with, form, groups);
    EXPECT_LE(std::abs(mine.first.loss.loss - one.first.loss.loss), bound) << what;
    EXPECT_LE(std::abs(mine.first.grad_norm / one.first.grad_norm - 1.0), bound) << what;
    EXPECT_EQ(mine.first.logical_tokens, one.first.logical_tokens) << what;
    EXPECT_NEAR(mine.first.loss.entropy_sum, one.first.loss.entropy_sum, 1e-3) << what;
    expect_near(mine.gradients, one.gradients, bound, what + " gradient");
    expect_near(mine.changes, one.changes, wide ? 1e-6 : 1e-3, what + " change");
    ASSERT_EQ(mine.first.log_prob.size(), one.first.log_prob.size());
    for (size_t k = 0; k < one.first.log_prob.size(); ++k) {
      EXPECT_LE(relative(mine.first.log_prob[k], one.first.log_prob[k]), bound) << what;
    }
    if (one.first.routers) {
      EXPECT_NEAR(mine.first.routers->loss, one.first.routers->loss, bound) << what;
    }
  });
}

inline nn::Recompute full(int64_t num_layers) {
  return {.method = nn::RecomputeMethod::kUniform, .num_layers = num_layers};
}

}  // namespace banyan::testing::context
