// Three updates of a model in stages, beside other forms, against those of one process.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include "banyan/parallel/pipeline_stage.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/three_steps.h"
#include "banyan/train/parallel_keys.h"

namespace banyan::testing::staged {

using namespace train;  // what these are steps of

inline std::string sizes(const std::string& rest) {
  return R"({"hidden_size": 32, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "initializer_range": 0.2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, )" +
         rest + "}";
}

// Biases and an untied head; norms of heads and a tied one.
inline std::string untied() { return sizes(R"("model_type": "qwen2", "vocab_size": 97)"); }
inline std::string tied() {
  return sizes(
      R"("model_type": "qwen3", "vocab_size": 96, "head_dim": 8, "tie_word_embeddings": true)");
}

// Experts behind a dense layer, and auxiliary losses.
inline std::string experts() {
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
  parallel::StageSplit split = {};
  nn::Recompute recompute = {};
};

inline Case with_stages(Case with, int64_t ranks, std::optional<int64_t> chunks = {}) {
  with.split.pipeline_model_parallel_size = ranks;
  with.split.virtual_pipeline_model_parallel_size = chunks;
  return with;
}

inline models::LoadOptions load_options(const Case& with, parallel::Groups& groups) {
  models::LoadOptions options{{.dtype = with.dtype}, true};
  set_cut(with.sequence, groups, options);
  set_stages(with.split, groups, options);
  return options;
}

inline Config small_blocks(const Case& with) {
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

inline Trained three_steps(const Case& with, parallel::Groups& groups) {
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

inline Trained alone(Case with) {
  with.split = {};
  with.ranges = with.heads = 1;
  parallel::Groups groups;
  return three_steps(with, groups);
}

inline parallel::MeshShape mesh_of(const Case& with, int64_t tensor = 1) {
  return {.tp = tensor,
          .cp = std::max(with.ranges, with.heads),
          .pp = with.split.pipeline_model_parallel_size};
}

inline void expect_equals_one(const Case& with,
                              const parallel::MeshShape& mesh,
                              int64_t size,
                              const Trained& one,
                              const std::string& what) {
  testing::run_mesh(size, mesh, [&](parallel::Groups& groups) {
    testing::expect_same_training(three_steps(with, groups), one, with.dtype, with.shard, what);
  });
}

}  // namespace banyan::testing::staged
