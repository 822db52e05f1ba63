// Pipeline parallel: ranks that hold different layers give what one process gives. The ranks are
// threads here; tests/distributed runs the same over processes.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>

#include "banyan/core/error.h"
#include "banyan/parallel/pipeline_stage.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/testing/fake_host.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/three_steps.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/testing/walk_run.h"
#include "banyan/train/critic.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/spread.h"
#include "banyan/train/trainer.h"

namespace banyan::train {
namespace {

using banyan::testing::all_of;
using banyan::testing::expect_near;
using banyan::testing::FakeHost;
using banyan::testing::Named;
using banyan::testing::relative;
using banyan::testing::ScratchDir;
using banyan::testing::tiny_prompts;
using banyan::testing::Trained;
using parallel::Groups;
using parallel::MeshShape;
using parallel::StageSplit;

std::string sizes(const std::string& rest) {
  return R"({"hidden_size": 32, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "initializer_range": 0.2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, )" +
         rest + "}";
}

// Biases and an untied head; norms of heads and a tied one.
std::string untied() { return sizes(R"("model_type": "qwen2", "vocab_size": 97)"); }
std::string tied() {
  return sizes(
      R"("model_type": "qwen3", "vocab_size": 96, "head_dim": 8, "tie_word_embeddings": true)");
}

// Experts behind a dense layer, and auxiliary losses.
std::string experts() {
  return sizes(R"("model_type": "qwen3_moe", "vocab_size": 97, "head_dim": 8, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": true,
                  "mlp_only_layers": [0])");
}

struct Case {
  std::string model;
  at::ScalarType dtype = at::kDouble;
  bool share = true;
  std::string carry = "auto";
  std::string loss_mode = "vanilla";
  bool shard = false;     // moments are shared out over the data-parallel ranks
  bool sequence = false;  // with tensor parallel
  int64_t ranges = 1;     // context parallel, by ranges or
  int64_t heads = 1;      // by heads
  StageSplit split = {};
  nn::Recompute recompute = {};
};

Case with_stages(Case with, int64_t ranks, std::optional<int64_t> chunks = {}) {
  with.split.pipeline_model_parallel_size = ranks;
  with.split.virtual_pipeline_model_parallel_size = chunks;
  return with;
}

models::LoadOptions load_options(const Case& with, Groups& groups) {
  models::LoadOptions options{{.dtype = with.dtype}, true};
  set_cut(with.sequence, groups, options);
  set_stages(with.split, groups, options);
  return options;
}

Config small_blocks(const Case& with) {
  Config config = testing::small_blocks();
  config.sharing.carry = with.carry;
  config.actor.policy_loss.loss_mode = with.loss_mode;
  config.actor.megatron.context_parallel_size = with.ranges;
  config.actor.ulysses_sequence_parallel_size = with.heads;
  config.actor.entropy_coeff = 0.01;
  config.actor.optim.clip_grad = 0.5;
  config.actor.optim.weight_decay = 0.01;
  config.actor.router = {
      .moe_aux_loss_coeff = 0.02, .moe_z_loss_coeff = 0.001, .moe_router_dtype = {}};
  return config;
}

Trained three_steps(const Case& with, Groups& groups) {
  at::set_num_threads(1);  // of this rank's thread
  const Config config = small_blocks(with);
  const auto model = models::random_model(with.model, 3, load_options(with, groups));
  model->set_recompute(with.recompute);
  Layout layout{with.share, {}};
  set_ranks(config, groups, layout);
  Trained out = testing::three_steps(config, *model, layout, with.shard, groups);
  const parallel::PipelineStage* stage = model->stage();
  if (model->shape().tied && stage && (stage->is_first_rank() || stage->is_last_rank())) {
    const at::Tensor both =
        groups.embedding.all_gather(model->params().at("model.embed_tokens.weight").master);
    EXPECT_TRUE(both[0].equal(both[1])) << "the copies of a tied head are apart";
  }
  return out;
}

Trained alone(Case with) {
  with.split = {};
  with.ranges = with.heads = 1;
  Groups groups;
  return three_steps(with, groups);
}

MeshShape mesh_of(const Case& with, int64_t tensor = 1) {
  return {.tp = tensor,
          .cp = std::max(with.ranges, with.heads),
          .pp = with.split.pipeline_model_parallel_size};
}

void expect_equals_one(const Case& with,
                       const MeshShape& mesh,
                       int64_t size,
                       const Trained& one,
                       const std::string& what) {
  testing::run_mesh(size, mesh, [&](Groups& groups) {
    testing::expect_same_training(three_steps(with, groups), one, with.dtype, with.shard, what);
  });
}

}  // namespace

TEST(PipelineRanks, UpdatesEqualOneProcess) {
  for (const auto& [name, model] : {std::pair{"untied", untied()}, {"tied", tied()}}) {
    for (const std::string carry : {"retain", "recompute", "dense"}) {
      const Case with{
          .model = model, .share = carry != "dense", .carry = carry != "dense" ? carry : "auto"};
      const Trained one = alone(with);
      EXPECT_GT(one.first.num_blocks, 3);
      EXPECT_EQ(one.first.walk.num_recomputed > 0, carry == "recompute");
      for (const int64_t ranks : {2, 4}) {
        const Case staged = with_stages(with, ranks);
        const std::string what = name + (" " + carry) + ", stages " + std::to_string(ranks);
        expect_equals_one(staged, mesh_of(staged), ranks, one, what);
      }
    }
  }
}

TEST(PipelineRanks, InterleavedStagesToo) {
  for (const std::string carry : {"retain", "recompute", "dense"}) {
    const Case with{.model = carry == "retain" ? untied() : tied(),
                    .share = carry != "dense",
                    .carry = carry != "dense" ? carry : "auto"};
    const Trained one = alone(with);
    const Case staged = with_stages(with, 2, 2);
    expect_equals_one(staged, mesh_of(staged), 2, one, carry + ", 2 x 2");
  }
}

// The losses of a layer's routers are over the tokens of the mini-batch, told before the backward.
TEST(PipelineRanks, ModelsWithExperts) {
  for (const std::string carry : {"retain", "recompute"}) {
    const Case with{.model = experts(), .carry = carry};
    const Trained one = alone(with);
    ASSERT_TRUE(one.first.routers);
    EXPECT_GT(one.first.routers->loss, 0.0);
    if (carry == "retain") {
      Case staged = with_stages(with, 2);
      expect_equals_one(staged, mesh_of(staged), 2, one, "experts");
      staged.recompute = {.method = nn::RecomputeMethod::kUniform, .num_layers = 2};
      expect_equals_one(staged, mesh_of(staged, 2), 4, one, "experts, TP2 PP2");
    } else {
      const Case staged = with_stages(with, 2, 2);
      expect_equals_one(staged, mesh_of(staged), 4, one, "experts, 2 x 2, DP2");
    }
  }
}

// The embedding or the head alone on a stage, and stages of other sizes.
TEST(PipelineRanks, UnevenStages) {
  const Case with{.model = tied()};
  const Trained one = alone(with);
  Case counted = with_stages(with, 3);
  counted.split.account_for_embedding_in_pipeline_split = true;
  counted.split.account_for_loss_in_pipeline_split = true;
  expect_equals_one(counted, mesh_of(counted), 3, one, "counted");
  Case first = with_stages(with, 2);
  first.split.num_layers_in_first_pipeline_stage = 1;
  expect_equals_one(first, mesh_of(first), 2, one, "one layer first");
}

TEST(PipelineRanks, StagesWithoutALayer) {
  Case with{.model = tied()};
  with.model.replace(with.model.find("num_hidden_layers\": 4"), 21, "num_hidden_layers\": 1");
  const Trained one = alone(with);
  Case counted = with_stages(with, 3);
  counted.split.account_for_embedding_in_pipeline_split = true;
  counted.split.account_for_loss_in_pipeline_split = true;
  expect_equals_one(counted, mesh_of(counted), 3, one, "embedding, layer, head");
}

TEST(PipelineRanks, BesideTensorAndDataParallelRanksWithSharedMoments) {
  for (const auto& [name, model] : {std::pair{"untied", untied()}, {"tied", tied()}}) {
    const Case with{.model = model};
    const Trained one = alone(with);
    Case staged = with_stages(with, 2);
    for (const bool sequence : {false, true}) {
      staged.sequence = sequence;
      expect_equals_one(staged, mesh_of(staged, 2), 4, one, name + std::string(" TP2 PP2"));
    }
    for (const bool shard : {false, true}) {
      staged.shard = shard;
      expect_equals_one(staged, mesh_of(staged), 4, one, name + std::string(" PP2 DP2"));
    }
  }
  const Case with{.model = tied(), .dtype = at::kFloat, .shard = true, .sequence = true};
  const Trained one = alone(with);
  const Case staged = with_stages(with, 2);
  expect_equals_one(staged, mesh_of(staged, 2), 8, one, "TP2 PP2 DP2");
}

TEST(PipelineRanks, BesideContextParallelRanks) {
  for (const std::string& model : {tied(), experts()}) {
    const Case with{.model = model};
    const Trained one = alone(with);
    for (const int64_t chunks : {1, 2}) {
      Case staged = with_stages(with, 2, chunks);
      staged.ranges = 2;
      if (chunks == 1) expect_equals_one(staged, mesh_of(staged), 4, one, "CP2 by ranges, PP2");
      staged.recompute = {.method = nn::RecomputeMethod::kUniform, .num_layers = 2};
      expect_equals_one(staged, mesh_of(staged), 4, one, "CP2 by ranges, PP2, recompute");
      staged.recompute = {};
      staged.ranges = 1;
      staged.heads = 2;
      expect_equals_one(staged, mesh_of(staged), 4, one, "CP2 by heads, PP2");
    }
  }
}

TEST(PipelineRanks, WhatABackwardComputesAgainIsTheSame) {
  const Case with{.model = tied()};
  const Trained one = alone(with);
  for (const nn::Recompute& recompute :
       {nn::Recompute{.method = nn::RecomputeMethod::kUniform, .num_layers = 2},
        nn::Recompute{.method = nn::RecomputeMethod::kBlock, .num_layers = 1},
        nn::Recompute{.method = nn::RecomputeMethod::kSelective, .core_attn = true, .mlp = true}}) {
    Case staged = with_stages(with, 2);
    staged.recompute = recompute;
    expect_equals_one(staged, mesh_of(staged), 2, one, "recompute");
  }
}

// Forks, duplicates and prefixes of any depth, cut anywhere, under both ways to carry.
TEST(PipelineRanks, WalksOfRandomTries) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const std::vector<Sample> samples =
        testing::random_samples({.seed = seed,
                                 .vocab = testing::kVocab,
                                 .depth = static_cast<int32_t>(seed % 5),
                                 .max_fan_out = 4,
                                 .max_samples = 16,
                                 .scored = 0.8});
    trie::PlanOptions options;
    options.max_tokens_per_block = 10 + static_cast<int64_t>(seed);
    options.carry = seed % 2 == 0 ? trie::Carry::kRetain : trie::Carry::kRecompute;
    const trie::Plan plan = trie::plan(samples, options);
    const LossScope scope = seed % 3 == 0 ? LossScope::kMiniBatch : LossScope::kSample;
    const testing::Outcome one =
        testing::run(*testing::model_of(seed % 5, testing::kFp64), plan, scope);
    testing::run_mesh(2, {.pp = 2}, [&](Groups& groups) {
      at::set_num_threads(1);
      models::LoadOptions load{testing::kFp64, true};
      set_stages({.pipeline_model_parallel_size = 2}, groups, load);
      const auto model =
          models::random_model(models::tiny_configs()[seed % 5].second, /*seed=*/7, load);
      const testing::Outcome mine = testing::run(*model, plan, scope);
      model->params().finish_grads();
      EXPECT_NEAR(mine.loss, one.loss, 1e-10 * std::max(1.0, std::abs(one.loss))) << seed;
      EXPECT_EQ(mine.num_calls, one.num_calls) << seed;
      for (const auto& [sample, value] : one.value) {
        EXPECT_TRUE(mine.value.at(sample).allclose(value, 1e-10, 1e-12)) << seed;
      }
      for (const Param& param : model->params().params()) {
        EXPECT_LE(relative(param.grad, one.gradients.at(param.name)), 1e-10)
            << param.name << " seed " << seed;
      }
    });
  }
}

// Losses that compare all tokens of a mini-batch: scored first.
TEST(PipelineRanks, LossesOfTheWholeMiniBatch) {
  const Case with{.model = untied(), .loss_mode = "kl_cov"};
  const Trained one = alone(with);
  for (const auto& [ranks, size] : {std::pair<int64_t, int64_t>{2, 2}, {2, 4}}) {
    const Case staged = with_stages(with, ranks, ranks == size ? 2 : 1);
    expect_equals_one(staged, mesh_of(staged), size, one, "kl_cov");
  }
}

TEST(PipelineRanks, ScoresAreThoseOfOneProcess) {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    const Case with{.model = tied(), .dtype = dtype};
    const Batch batch = testing::batch_with_values();
    const HeadSpec head{.temperature = 0.7, .with_entropy = true, .with_sum_squares = true};
    trie::PlanOptions options;
    options.max_tokens_per_block = 24;
    options.for_backward = false;
    const auto scores = [&](const Case& of, Groups& groups) {
      at::set_num_threads(1);
      const auto model = models::random_model(of.model, 3, load_options(of, groups));
      Layout layout{true, {}};
      layout.ranks = &groups.data;
      return score_batch_over(batch, *model, options, head, "test", layout);
    };
    Groups one_process;
    const BatchScores one = scores(with, one_process);
    for (const int64_t chunks : {1, 2}) {
      const Case staged = with_stages(with, 2, chunks);
      testing::run_mesh(2, mesh_of(staged), [&](Groups& groups) {
        const BatchScores mine = scores(staged, groups);
        for (size_t i = 0; i < one.value.size(); ++i) {  // the bits do not depend on who computes
          EXPECT_TRUE(mine.value[i].equal(one.value[i])) << i;
          EXPECT_TRUE(mine.entropy[i].equal(one.entropy[i])) << i;
          EXPECT_TRUE(mine.sum_squares[i].equal(one.sum_squares[i])) << i;
        }
      });
    }
  }
}

TEST(PipelineRanks, ACriticEqualsOneProcess) {
  const Batch batch = testing::batch_with_values();
  const auto gradients = [&](const Case& with, Groups& groups) {
    at::set_num_threads(1);
    models::LoadOptions options = load_options(with, groups);
    options.head = models::HeadKind::kValue;
    const auto model = models::random_model(with.model, 5, options);
    Layout layout{true, {}};
    layout.ranks = &groups.data;
    const CriticUpdate update = accumulate_value_gradients(
        small_blocks(with), batch, all_of(batch).samples, layout, *model);
    EXPECT_GT(update.num_tokens, 0.0);
    EXPECT_NE(update.loss, 0.0);
    return testing::whole_gradients(*model, parallel::WeightView(model->params(), groups));
  };
  const Case with{.model = tied()};
  Groups one_process;
  const Named one = gradients(with, one_process);
  const Case staged = with_stages(with, 2);
  testing::run_mesh(2, mesh_of(staged), [&](Groups& groups) {
    expect_near(gradients(staged, groups), one, 1e-10, "critic");
  });
}

TEST(PipelineRanks, TwoRunsHaveTheSameBits) {
  std::vector<Named> all;
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    const Case with = with_stages({.model = tied(), .dtype = at::kFloat}, 2, 2);
    testing::run_mesh(2, mesh_of(with), [&](Groups& groups) {
      Trained mine = three_steps(with, groups);
      const std::lock_guard lock(mutex);
      all.push_back(std::move(mine.changes));
    });
  }
  for (size_t i = 1; i < all.size(); ++i) {
    for (const auto& [name, tensor] : all[0]) EXPECT_TRUE(tensor.equal(all[i].at(name))) << name;
  }
}

// By the formulas of docs/guides/scale_out.md.
TEST(PipelineRanks, BytesSentAreThoseOfTheFormulas) {
  for (const auto& [ranks, chunks] : {std::pair<int64_t, int64_t>{2, 1}, {4, 1}, {2, 2}}) {
    const Case with = with_stages({.model = untied()}, ranks, chunks);
    const Config config = small_blocks(with);
    const Batch batch = testing::batch_with_values();
    testing::run_mesh(ranks, mesh_of(with), [&](Groups& groups) {
      at::set_num_threads(1);
      const auto model = models::random_model(with.model, 3, load_options(with, groups));
      Layout layout{true, {}};
      layout.ranks = &groups.data;
      const UpdateResult result =
          accumulate_gradients(config, batch, all_of(batch), layout, *model);
      ASSERT_GT(result.num_blocks, 3);
      const trie::Plan plan =
          trie::plan(samples_of(batch, all_of(batch).samples),
                     plan_options(config.sharing, layout, block_limits(config.actor), true));
      int64_t numbers = 0;  // of the heads
      for (const trie::Block& block : plan.blocks) {
        numbers += static_cast<int64_t>(block.edges.token.size() + block.edges.source.size());
      }
      constexpr int64_t kHidden = 32, kBytes = 8;
      const int64_t rank = groups.pipeline.rank();
      const int64_t last = ranks - 1;
      // Stages that send on, and stages that send back.
      const int64_t sends = chunks - (rank == last ? 1 : 0) + chunks - (rank == 0 ? 1 : 0);
      const auto& traffic = groups.pipeline.traffic();
      EXPECT_EQ(traffic.at("send").bytes, sends * result.computed_tokens * kHidden * kBytes);
      EXPECT_EQ(traffic.at("send").calls, sends * result.num_blocks);
      EXPECT_EQ(traffic.at("broadcast").bytes, rank == last ? numbers * 8 : 0);
      EXPECT_EQ(traffic.at("all_gather").bytes, (ranks - 1) * (8 + 3 * 8));
      const auto most = static_cast<double>(result.walk.peak_activation_bytes);
      for (const double peak : groups.pipeline.all_gather_number(most)) EXPECT_EQ(peak, most);
    });
  }
}

// What a stage keeps of a block is what nn/activation_bytes.h says of its layers; embedding and
// head keep their part on their stages, and the stages together what one process keeps.
TEST(PipelineRanks, AStageKeepsTheActivationsOfItsLayers) {
  const std::vector<Sample> samples = testing::samples_from({{1, 2, 3, 4, 5, 6, 7, 8}});
  const trie::Plan plan = trie::plan(samples, {});
  for (const int64_t chunks : {1, 2}) {
    const Case with = with_stages({.model = tied()}, 2, chunks);
    std::vector<int64_t> kept(2, 0);
    testing::run_mesh(2, mesh_of(with), [&](Groups& groups) {
      at::set_num_threads(1);
      const auto model = models::random_model(with.model, 3, load_options(with, groups));
      const testing::Outcome mine = testing::run(*model, plan);
      const int64_t rank = groups.pipeline.rank();
      kept[rank] = model->activation_bytes().kept;
      const int64_t rows = rank == 1 ? 7 * 32 * 8 : 0;  // [R, E] of the head
      EXPECT_EQ(mine.stats.peak_activation_bytes, 8 * kept[rank] + rows) << rank;
      EXPECT_EQ(mine.stats.peak_live_tokens, 8) << rank;
    });
    Groups one_process;
    const auto whole = models::random_model(
        with.model, 3, load_options(with_stages({.model = tied()}, 1), one_process));
    const int64_t more_positions = 4 * (2 * chunks - 1);  // one list a stage
    EXPECT_EQ(kept[0] + kept[1], whole->activation_bytes().kept + more_positions);
  }
}

TEST(PipelineRanks, SplitsThatDoNotFitTheModelAreRefusedByName) {
  const auto refusal = [](const Case& with) {
    std::string text;
    std::mutex mutex;
    testing::run_mesh(with.split.pipeline_model_parallel_size, mesh_of(with), [&](Groups& groups) {
      try {
        models::random_model(with.model, 1, load_options(with, groups));
      } catch (const std::invalid_argument& error) {
        const std::lock_guard lock(mutex);
        text = error.what();
      }
    });
    return text;
  };
  EXPECT_NE(
      refusal(with_stages({.model = tied()}, 3))
          .find("[config] actor_rollout_ref.actor.megatron.pipeline_model_parallel_size: wanted "
                "layers that divide: 4 of 4"),
      std::string::npos);
}

}  // namespace banyan::train
