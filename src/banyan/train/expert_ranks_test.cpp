// Experts over ranks: those that hold some of the experts each (expert parallel), a part of each
// (tensor parallel), or a part of some, give what one process gives. The ranks are threads here;
// tests/distributed runs the same over processes.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "banyan/parallel/groups.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/update.h"
#include "banyan/train/walk.h"

namespace banyan::train {
namespace {

using banyan::testing::all_of;
using banyan::testing::relative;
using parallel::Groups;
using parallel::MeshShape;
using Named = std::map<std::string, at::Tensor>;

// Two layers with experts and a dense one.
const char* kModel = R"({"model_type": "qwen3_moe", "hidden_size": 48, "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "initializer_range": 0.2,
    "vocab_size": 97, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 41,
    "norm_topk_prob": true, "mlp_only_layers": [1]})";

struct Case {
  at::ScalarType dtype = at::kDouble;
  bool share = true;
  bool with_losses = false;
  nn::Recompute recompute = {};
  int64_t num_samples = 15;  // fewer than ranks: some of them have none
  bool sequence = false;     // sequence parallel, with tensor parallel
  bool by_heads = false;     // context parallel, else by ranges
};

struct Outcome {
  UpdateResult result;  // of the first update
  Named gradients;      // of this rank's parameters
  Named changes;        // of them over three steps of AdamW that shares its moments out
  std::map<std::string, Cut> cuts;
};

at::Tensor own_part(const Param& param, const at::Tensor& whole) {
  const int64_t dim = param.cut.dim;
  return param.cut.part_of(whole, dim < 0 ? 0 : param.master.size(dim));
}

Outcome three_steps(const Case& with, Groups& groups) {
  Config config = testing::small_blocks();
  config.actor.optim.clip_grad = 0.5;
  config.actor.entropy_coeff = 0.01;
  if (with.with_losses) {
    config.actor.router = {
        .moe_aux_loss_coeff = 0.1, .moe_z_loss_coeff = 0.02, .moe_router_dtype = {}};
  }
  models::LoadOptions options{{.dtype = with.dtype}, true};
  options.experts = &groups.expert;
  set_cut(with.sequence, groups, options);
  const auto whole = models::random_model(kModel, 3, {{.dtype = with.dtype}, true});
  const auto model = models::random_model(kModel, 3, options);
  model->set_recompute(with.recompute);
  const Batch batch = testing::batch_of_five();
  MiniBatch mini_batch = all_of(batch);
  mini_batch.samples.resize(with.num_samples);
  Layout layout{with.share, {}};
  (with.by_heads ? config.actor.ulysses_sequence_parallel_size
                 : config.actor.megatron.context_parallel_size) = groups.context.size();
  set_ranks(config, groups, layout);
  layout.expert_ranks = &groups.expert_data;
  const auto optimizer = make_optimizer(config.actor.optim, *model, groups);
  Outcome out;
  accumulate_gradients(config, batch, mini_batch, layout, *model);
  for (const Param& param : model->params().params()) {
    out.gradients[param.name] = param.grad.clone();
    out.cuts[param.name] = param.cut;
  }
  for (int step = 0; step < 3; ++step) {
    UpdateResult result =
        update(config, batch, mini_batch, layout, /*verify=*/false, 1e-3, *model, *optimizer);
    if (step == 0) out.result = std::move(result);
  }
  for (const Param& param : model->params().params()) {
    out.changes[param.name] =
        param.master.sub(own_part(param, whole->params().at(param.name).master));
  }
  return out;
}

void expect_equals_one(const Case& with,
                       const MeshShape& mesh,
                       int64_t size,
                       const std::string& what) {
  Groups alone;
  const Outcome one = three_steps(with, alone);
  const double bound = with.dtype == at::kDouble ? 1e-10 : 1e-5;
  const double changes_bound = with.dtype == at::kDouble ? 1e-6 : 1e-3;
  std::map<std::string, int64_t> seen;
  std::mutex mutex;
  testing::run_mesh(size, mesh, [&](Groups& groups) {
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
    EXPECT_EQ(count, dealt ? size / mesh.ep : size) << what << " " << name;
  }
}

TEST(ExpertRanks, GradientsAndWeightsEqualThoseOfOneProcess) {
  for (const bool share : {true, false}) {
    const std::string how = share ? " on" : " off";
    expect_equals_one({.share = share}, {.ep = 2}, 2, "ep 2" + how);
    expect_equals_one({.dtype = at::kFloat, .share = share}, {.ep = 2}, 2, "ep 2 fp32" + how);
    expect_equals_one({.share = share}, {.ep = 2}, 4, "ep 2 dp 2" + how);
    expect_equals_one({.share = share}, {.ep = 4}, 4, "ep 4" + how);
    expect_equals_one({.share = share, .with_losses = true}, {.ep = 2}, 4, "losses" + how);
  }
}

TEST(ExpertRanks, PartsOfExpertsOverTensorParallelRanksEqualOneProcess) {
  for (const bool sequence : {false, true}) {
    const std::string how = sequence ? " sequence" : "";
    for (const bool share : {true, false}) {
      const Case with{.share = share, .with_losses = share, .sequence = sequence};
      expect_equals_one(with, {.tp = 2}, 2, "tp 2" + how);
      expect_equals_one(with, {.tp = 2, .ep = 2, .etp = 2}, 4, "ep 2 etp 2" + how);
    }
    expect_equals_one({.dtype = at::kFloat, .sequence = sequence}, {.tp = 2}, 4, "tp 2 dp 2" + how);
  }
}

TEST(ExpertRanks, BesideContextParallelEqualOneProcess) {
  for (const bool by_heads : {false, true}) {
    const std::string how = by_heads ? " heads" : " ranges";
    const Case with{.with_losses = true, .by_heads = by_heads};
    expect_equals_one(with, {.cp = 2, .ep = 2}, 2, "cp 2 ep 2" + how);
    expect_equals_one(with, {.cp = 2, .ep = 4}, 4, "cp 2 ep 4" + how);
    expect_equals_one(
        {.num_samples = 3, .by_heads = by_heads}, {.cp = 2, .ep = 2}, 4, "one group" + how);
  }
}

TEST(ExpertRanks, RecomputeAndRanksWithoutSamplesStayInStep) {
  using nn::RecomputeMethod;
  const nn::Recompute uniform{.method = RecomputeMethod::kUniform, .num_layers = 2};
  expect_equals_one({.recompute = uniform}, {.ep = 2}, 2, "uniform 2");
  expect_equals_one({.recompute = {.method = RecomputeMethod::kUniform, .num_layers = 9}},
                    {.ep = 2},
                    4,
                    "uniform 9");
  expect_equals_one(
      {.recompute = {.method = RecomputeMethod::kBlock, .num_layers = 1}}, {.ep = 2}, 2, "block 1");
  expect_equals_one({.with_losses = true, .num_samples = 3}, {.ep = 4}, 4, "one group");
  expect_equals_one({.recompute = uniform, .num_samples = 3, .sequence = true},
                    {.tp = 2, .ep = 2, .etp = 2},
                    4,
                    "one group, ep 2 etp 2");
}

// The forward has the bits of one process.
TEST(ExpertRanks, LogProbabilitiesHaveTheBitsOfOneProcess) {
  const Case with{.dtype = at::kBFloat16};
  Groups alone;
  const Outcome one = three_steps(with, alone);
  testing::run_mesh(2, MeshShape{.ep = 2}, [&](Groups& groups) {
    const Outcome part = three_steps(with, groups);
    ASSERT_EQ(part.result.log_prob.size(), one.result.log_prob.size());
    for (size_t i = 0; i < one.result.log_prob.size(); ++i) {
      EXPECT_TRUE(part.result.log_prob[i].equal(one.result.log_prob[i])) << i;
    }
  });
}

}  // namespace
}  // namespace banyan::train
