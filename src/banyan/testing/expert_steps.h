// Three steps of a model whose experts lie on several ranks, and how they compare with those of one
// process: for tests of experts dealt out, alone and in a pipeline.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "banyan/parallel/groups.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/update.h"

namespace banyan::testing::experts {

using Named = std::map<std::string, at::Tensor>;

// Two layers with experts and a dense one.
inline const char* kModel =
    R"({"model_type": "qwen3_moe", "hidden_size": 48, "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "initializer_range": 0.2,
    "vocab_size": 97, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 41,
    "norm_topk_prob": true, "mlp_only_layers": [1]})";

// Of four, for stages.
inline std::string four_layers() {
  std::string model = kModel;
  model.replace(model.find("num_hidden_layers\": 3"), 21, "num_hidden_layers\": 4");
  return model;
}

struct Case {
  std::string model = kModel;
  at::ScalarType dtype = at::kDouble;
  bool share = true;
  bool with_losses = false;
  nn::Recompute recompute = {};
  int64_t num_samples = 15;  // fewer than ranks: some of them have none
  bool sequence = false;     // sequence parallel, with tensor parallel
  bool by_heads = false;     // context parallel, else by ranges
  std::string carry = "auto";
  std::optional<int64_t> chunks = {};  // of a stage
  std::optional<int64_t> parts = {};   // of an expert; as many as ranks of tensor parallel if empty
  std::string loss_mode = "vanilla";
};

struct Outcome {
  train::UpdateResult result;  // of the first update
  Named gradients;             // of this rank's parameters
  Named changes;               // of them over three steps of AdamW that shares its moments out
  std::map<std::string, Cut> cuts;
};

inline at::Tensor own_part(const Param& param, const at::Tensor& whole) {
  const int64_t dim = param.cut.dim;
  return param.cut.part_of(whole, dim < 0 ? 0 : param.master.size(dim));
}

inline Outcome three_steps(const Case& with, parallel::Groups& groups) {
  Config config = small_blocks();
  config.actor.optim.clip_grad = 0.5;
  config.actor.entropy_coeff = 0.01;
  config.sharing.carry = with.carry;
  config.actor.policy_loss.loss_mode = with.loss_mode;
  config.actor.megatron.tensor_model_parallel_size = groups.tensor.size();
  config.actor.megatron.expert_tensor_parallel_size = with.parts;
  config.actor.megatron.pipeline_model_parallel_size = groups.pipeline.size();
  config.actor.megatron.virtual_pipeline_model_parallel_size = with.chunks;
  if (with.with_losses) {
    config.actor.router = {
        .moe_aux_loss_coeff = 0.1, .moe_z_loss_coeff = 0.02, .moe_router_dtype = {}};
  }
  models::LoadOptions options{{.dtype = with.dtype}, true};
  train::set_experts(config, groups, options);
  train::set_cut(with.sequence, groups, options);
  train::set_stages(train::stage_split(config), groups, options);
  const auto whole = models::random_model(with.model, 3, {{.dtype = with.dtype}, true});
  const auto model = models::random_model(with.model, 3, options);
  model->set_recompute(with.recompute);
  const train::Batch batch = batch_of_five();
  train::MiniBatch mini_batch = all_of(batch);
  mini_batch.samples.resize(with.num_samples);
  train::Layout layout{with.share, {}};
  (with.by_heads ? config.actor.ulysses_sequence_parallel_size
                 : config.actor.megatron.context_parallel_size) = groups.context.size();
  train::set_ranks(config, groups, layout);
  const auto optimizer = train::make_optimizer(config.actor.optim, *model, groups);
  Outcome out;
  train::accumulate_gradients(config, batch, mini_batch, layout, *model);
  for (const Param& param : model->params().params()) {
    out.gradients[param.name] = param.grad.clone();
    out.cuts[param.name] = param.cut;
  }
  for (int step = 0; step < 3; ++step) {
    train::UpdateResult result = train::update(
        config, batch, mini_batch, layout, /*verify=*/false, 1e-3, *model, *optimizer);
    if (step == 0) out.result = std::move(result);
  }
  for (const Param& param : model->params().params()) {
    out.changes[param.name] =
        param.master.sub(own_part(param, whole->params().at(param.name).master));
  }
  return out;
}

inline void expect_equals_one(const Case& with,
                              const parallel::MeshShape& mesh,
                              int64_t size,
                              const std::string& what) {
  parallel::Groups alone;
  Case whole = with;
  whole.chunks = whole.parts = {};
  const Outcome one = three_steps(whole, alone);
  if (with.carry == "recompute" && with.share) {
    EXPECT_GT(one.result.walk.num_recomputed, 0);
  }
  const double bound = with.dtype == at::kDouble ? 1e-10 : 1e-5;
  const double changes_bound = with.dtype == at::kDouble ? 1e-6 : 1e-3;
  std::map<std::string, int64_t> seen;
  std::mutex mutex;
  run_mesh(size, mesh, [&](parallel::Groups& groups) {
    const Outcome part = three_steps(with, groups);
    const std::lock_guard lock(mutex);
    EXPECT_NEAR(part.result.loss.loss, one.result.loss.loss, bound) << what;
    EXPECT_NEAR(part.result.grad_norm / one.result.grad_norm, 1.0, bound) << what;
    ASSERT_TRUE(part.result.routers.has_value());
    EXPECT_NEAR(part.result.routers->loss, one.result.routers->loss, bound) << what;
    EXPECT_NEAR(part.result.routers->max_load, one.result.routers->max_load, 1e-6) << what;
    for (const auto& [name, gradient] : part.gradients) {
      ++seen[name];
      const Cut& cut = part.cuts.at(name);
      const auto of_one = [&](const Named& whole) {
        return cut.part_of(whole.at(name), cut.is_whole() ? 0 : gradient.size(cut.dim));
      };
      EXPECT_LE(relative(gradient, of_one(one.gradients)), bound) << what << " " << name;
      // AdamW makes much of a router's small gradients, which are differences of large numbers.
      const bool is_router = name.ends_with("mlp.gate.weight");
      EXPECT_LE(relative(part.changes.at(name), of_one(one.changes)),
                (is_router ? 10 : 1) * changes_bound)
          << what << " " << name;
    }
  });
  ASSERT_EQ(seen.size(), one.gradients.size()) << what;
  for (const auto& [name, count] : seen) {
    const bool dealt = name.find(".experts.") != std::string::npos;
    EXPECT_EQ(count, size / mesh.pp / (dealt ? mesh.ep : 1)) << what << " " << name;
  }
}

}  // namespace banyan::testing::experts
