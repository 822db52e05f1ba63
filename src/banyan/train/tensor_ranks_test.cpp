// Tensor parallel: ranks that hold a part of every layer give what one process gives. The ranks are
// threads here; tests/distributed runs the same over processes.
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "banyan/core/error.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/testing/layout_run.h"
#include "banyan/testing/three_steps.h"
#include "banyan/train/critic.h"

namespace banyan::train {
namespace {

using banyan::testing::all_of;
using banyan::testing::expect_near;
using banyan::testing::Named;
using banyan::testing::relative;
using banyan::testing::ScratchDir;
using banyan::testing::Trained;
using parallel::Groups;
using parallel::MeshShape;

std::string sizes(const std::string& rest) {
  return R"({"hidden_size": 48, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "initializer_range": 0.2, )" +
         rest + "}";
}

// Biases, kv heads, F and vocabulary that do not divide by two; norms of heads; tied and untied.
std::vector<std::pair<std::string, std::string>> shapes() {
  return {
      {"qwen2", sizes(R"("model_type": "qwen2", "vocab_size": 97, "intermediate_size": 71,
         "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": false)")},
      {"qwen3",
       sizes(R"("model_type": "qwen3", "vocab_size": 96, "intermediate_size": 64, "head_dim": 24,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true)")},
      {"llama", sizes(R"("model_type": "llama", "vocab_size": 99, "intermediate_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": true,
         "mlp_bias": true)")},
  };
}

struct Case {
  std::string model;
  at::ScalarType dtype = at::kDouble;
  bool share = true;
  bool sequence = false;
  bool shard = false;  // moments are shared out over the data-parallel ranks
  nn::Recompute recompute = {};
};

models::LoadOptions load_options(const Case& with, Groups& groups) {
  models::LoadOptions options{{.dtype = with.dtype}, true};
  set_cut(with.sequence, groups, options);
  return options;
}

Config small_blocks() {
  Config config = testing::small_blocks();
  config.actor.entropy_coeff = 0.01;
  config.actor.optim.clip_grad = 0.5;
  config.actor.optim.weight_decay = 0.01;
  return config;
}

Trained three_steps(const Case& with, Groups& groups) {
  const auto model = models::random_model(with.model, 3, load_options(with, groups));
  model->set_recompute(with.recompute);
  Layout layout{with.share, {}};
  layout.ranks = &groups.data;
  return testing::three_steps(small_blocks(), *model, layout, with.shard, groups);
}

Trained alone(const Case& with) {
  Groups groups;
  return three_steps(with, groups);
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

TEST(TensorRanks, UpdatesEqualOneProcess) {
  for (const auto& [name, model] : shapes()) {
    for (const bool share : {true, false}) {
      Case with{.model = model, .share = share};
      const Trained one = alone(with);
      EXPECT_GT(one.first.num_blocks, 3);
      for (const bool sequence : {false, true}) {
        with.sequence = sequence;
        const std::string what = name + (share ? ", shared" : ", dense") + (sequence ? ", SP" : "");
        expect_equals_one(with, {.tp = 2}, 2, one, what);
        // Four ranks for three kv heads would need another cut than this one.
        if (name != "qwen2") expect_equals_one(with, {.tp = 4}, 4, one, what + ", 4 ranks");
      }
    }
  }
}

TEST(TensorRanks, InFp32TooAndWithDataParallelRanksAndSharedMoments) {
  for (const auto& [name, model] : shapes()) {
    Case with{.model = model, .dtype = at::kFloat};
    const Trained one = alone(with);
    for (const bool sequence : {false, true}) {
      with.sequence = sequence;
      with.shard = false;
      expect_equals_one(with, {.tp = 2}, 4, one, name + " dp 2" + (sequence ? ", SP" : ""));
      with.shard = true;
      expect_equals_one(with, {.tp = 2}, 4, one, name + " sharded" + (sequence ? ", SP" : ""));
    }
  }
}

TEST(TensorRanks, WhatABackwardComputesAgainIsTheSame) {
  Case with{.model = shapes()[1].second};
  const Trained one = alone(with);
  for (const nn::Recompute& recompute :
       {nn::Recompute{.method = nn::RecomputeMethod::kUniform, .num_layers = 2},
        nn::Recompute{.method = nn::RecomputeMethod::kSelective, .core_attn = true, .mlp = true}}) {
    with.recompute = recompute;
    for (const bool sequence : {false, true}) {
      with.sequence = sequence;
      expect_equals_one(with, {.tp = 2}, 2, one, "recompute");
    }
  }
}

// Native kernels, bf16: every product is rounded at other places than in one process.
TEST(TensorRanks, InBf16AsNearAsRoundingAllows) {
  Case with{.model = shapes()[1].second, .dtype = at::kBFloat16};
  const Trained one = alone(with);
  for (const bool sequence : {false, true}) {
    with.sequence = sequence;
    testing::run_mesh(2, {.tp = 2}, [&](Groups& groups) {
      const Trained mine = three_steps(with, groups);
      EXPECT_NEAR(mine.first.loss.loss, one.first.loss.loss, 2e-2);
      EXPECT_NEAR(mine.first.grad_norm / one.first.grad_norm, 1.0, 5e-2);
      for (const auto& [name, wanted] : one.gradients) {
        const at::Tensor got = mine.gradients.at(name);
        const double cosine = (got * wanted).sum().item<double>() /
                              (got.norm().item<double>() * wanted.norm().item<double>());
        EXPECT_GT(cosine, 0.99) << name;
      }
    });
  }
}

TEST(TensorRanks, TwoRunsHaveTheSameBitsAndSequenceParallelHasThoseWithoutIt) {
  std::vector<Named> all;
  std::mutex mutex;
  for (const bool sequence : {false, false, true}) {
    const Case with{.model = shapes()[0].second, .dtype = at::kFloat, .sequence = sequence};
    testing::run_mesh(2, {.tp = 2}, [&](Groups& groups) {
      Trained mine = three_steps(with, groups);
      const std::lock_guard lock(mutex);
      all.push_back(std::move(mine.changes));
    });
  }
  for (size_t run = 1; run < 4; ++run) {
    for (const auto& [name, tensor] : all[0]) {
      EXPECT_TRUE(tensor.equal(all[run].at(name))) << name << " run " << run;
    }
  }
  // Only the norms' gradients are added in another order with sequence parallel.
  for (const auto& [name, tensor] : all[0]) {
    EXPECT_LE(relative(all[4].at(name), tensor), 1e-3) << name;
  }
}

TEST(TensorRanks, ACriticEqualsOneProcess) {
  const Config config = small_blocks();
  const Batch batch = testing::batch_with_values();
  const auto gradients = [&](Groups& groups, bool sequence) {
    Case with{.model = shapes()[1].second, .sequence = sequence};
    models::LoadOptions options = load_options(with, groups);
    options.head = models::HeadKind::kValue;
    const auto model = models::random_model(with.model, 5, options);
    Layout layout{true, {}};
    layout.ranks = &groups.data;
    const CriticUpdate update =
        accumulate_value_gradients(config, batch, all_of(batch).samples, layout, *model);
    EXPECT_GT(update.num_tokens, 0.0);
    return testing::whole_gradients(*model, parallel::WeightView(model->params(), groups));
  };
  Groups one_process;
  const Named one = gradients(one_process, false);
  for (const bool sequence : {false, true}) {
    testing::run_mesh(2, {.tp = 2}, [&](Groups& groups) {
      expect_near(gradients(groups, sequence), one, 1e-10, "critic");
    });
  }
}

// The bytes of one mini-batch in one block, by the formulas of docs/guides/scale_out.md.
TEST(TensorRanks, BytesSentAreThoseOfTheFormulas) {
  Config config = small_blocks();
  config.actor.ppo_max_token_len_per_gpu = 4096;
  const Batch batch = testing::batch_with_values();
  for (const int64_t n : {2, 4}) {
    for (const bool sequence : {false, true}) {
      testing::run_mesh(n, {.tp = n}, [&](Groups& groups) {
        const Case with{.model = shapes()[1].second, .sequence = sequence};
        const auto model = models::random_model(with.model, 3, load_options(with, groups));
        Layout layout{true, {}};
        layout.ranks = &groups.data;
        const UpdateResult result =
            accumulate_gradients(config, batch, all_of(batch), layout, *model);
        ASSERT_EQ(result.num_blocks, 1);
        constexpr int64_t kLayers = 2, kHidden = 48, kHead = 24, kBytes = 8;
        const int64_t t = result.unique_tokens;
        const auto rounded = [&](int64_t count) { return (count + n - 1) / n * n; };
        // One sum of `count` numbers: pieces to their owners; as much again where all need it.
        const auto sum = [&](int64_t count) { return rounded(count) / n * (n - 1) * kBytes; };
        const trie::Plan plan = trie::plan(samples_of(batch, all_of(batch).samples), {});
        const auto r = static_cast<int64_t>(plan.blocks[0].edges.source.size());
        const auto x = static_cast<int64_t>(plan.blocks[0].edges.token.size());
        const int64_t rows = sequence ? sum(rounded(t) * kHidden) : sum(t * kHidden);
        const int64_t norms = kLayers * 2 * kHead + (sequence ? (2 * kLayers + 1) * kHidden : 0);
        // kv heads that two ranks hold: k_proj and v_proj of two heads.
        const int64_t copies = n == 4 ? 2 * kLayers * sum(2 * kHead * kHidden) : 0;
        const int64_t sums = (4 * kLayers + 1) * rows + sum(r * kHidden) + copies + sum(norms);
        const int64_t head = (n - 1) * (2 * r + x) * kBytes;
        const int64_t back = sequence ? (6 * kLayers + 2) * rows : (4 * kLayers + 1) * rows;
        const auto& traffic = groups.tensor.traffic();
        EXPECT_EQ(traffic.at("all_to_all").bytes, sums) << n << " " << sequence;
        EXPECT_EQ(traffic.at("all_gather").bytes,
                  back + sum(r * kHidden) + copies + sum(norms) + head)
            << n << " " << sequence;
      });
    }
  }
}

TEST(TensorRanks, SizesThatCannotBeCutAreRefusedByName) {
  const auto refusal = [](const std::string& model, int64_t size) {
    std::string text;
    std::mutex mutex;
    testing::run_mesh(size, {.tp = size}, [&](Groups& groups) {
      try {
        models::random_model(model, 1, load_options({.model = model}, groups));
      } catch (const std::invalid_argument& error) {
        const std::lock_guard lock(mutex);
        text = error.what();
      }
    });
    return text;
  };
  EXPECT_NE(refusal(shapes()[0].second, 4)
                .find("[config] actor_rollout_ref.actor.megatron.tensor_model_parallel_size: "
                      "wanted a multiple of "
                      "num_key_value_heads (3) or at most that many, got 4"),
            std::string::npos);
  EXPECT_NE(refusal(shapes()[1].second, 6).find("wanted at most num_attention_heads (4), got 6"),
            std::string::npos);
}

TEST(TensorRanks, ARoleWhoseModelCannotBeCutIsRefusedByItsOwnKey) {
  const ScratchDir scratch("tensor-role");
  const ScratchDir other("tensor-role-other");
  Config config = testing::layout_config(scratch, testing::tiny_config_json());
  std::string narrow = testing::tiny_config_json();
  narrow.replace(narrow.find("\"num_attention_heads\": 4"), 24, "\"num_attention_heads\": 1");
  narrow.replace(narrow.find("\"num_key_value_heads\": 2"), 24, "\"num_key_value_heads\": 1");
  const std::string model = testing::write_tiny_model(other, 1, narrow);
  config.actor.megatron.tensor_model_parallel_size = 2;
  config.critic.megatron.tensor_model_parallel_size = 2;
  config.ref_tensor_model_parallel_size = 2;
  const auto refusal = [&](const Config& with) -> std::string {
    try {
      testing::run_layout(2 * with.actor.ulysses_sequence_parallel_size, with);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const std::string wanted =
      "megatron.tensor_model_parallel_size: wanted at most num_attention_heads (1), got 2";
  Config critic = config;
  critic.critic_model_path = model;
  EXPECT_EQ(refusal(critic), "[config] critic." + wanted);
  Config reference = config;
  reference.ref_model_path = model;
  EXPECT_EQ(refusal(reference), "[config] actor_rollout_ref.ref." + wanted);
  // Heads over context ranks are looked at earlier.
  for (Config* with : {&critic, &reference}) {
    with->actor.ulysses_sequence_parallel_size = 2;
    with->ref_ulysses_sequence_parallel_size = 2;
    with->critic.ulysses_sequence_parallel_size = 2;
  }
  EXPECT_EQ(refusal(critic), "[config] critic." + wanted);
  EXPECT_EQ(refusal(reference), "[config] actor_rollout_ref.ref." + wanted);
}

// Three steps with a reference and a critic; then one more from the checkpoint, under another cut.
TEST(TensorRanks, ARunEqualsThatOfOneProcessAndResumesUnderAnyCut) {
  const ScratchDir scratch("tensor-run");
  Config config = testing::layout_config(scratch, testing::tiny_config_json());
  config.trainer.total_training_steps = 3;
  const testing::Ended one = testing::run_layout(1, config)[0];
  const Named wanted = testing::masters(scratch / "one/global_step_3");

  Config cut = config;
  cut.trainer.default_local_dir = scratch / "cut";
  for (MegatronConfig* megatron : {&cut.actor.megatron, &cut.critic.megatron}) {
    megatron->tensor_model_parallel_size = 2;
    megatron->sequence_parallel = true;
  }
  cut.ref_tensor_model_parallel_size = 2;
  for (const testing::Ended& rank : testing::run_layout(4, cut)) {
    testing::expect_same_run(rank, one, "cut");
  }
  const Named saved = testing::masters(scratch / "cut/global_step_3");
  for (const auto& [name, tensor] : wanted) {
    EXPECT_LE(relative(saved.at(name), tensor), 1e-4) << name;
  }

  // Nothing to train: what was loaded under another cut is saved with the same bits.
  const auto again = [&](int64_t size, int64_t tensor) {
    Config other = cut;
    other.actor.megatron.tensor_model_parallel_size = tensor;
    other.critic.megatron.tensor_model_parallel_size = tensor;
    other.ref_tensor_model_parallel_size = tensor;
    other.actor.optim.lr = 0.0;
    other.critic.optim.lr = 0.0;
    other.trainer.total_training_steps = 4;
    other.trainer.resume_mode = "resume_path";
    other.trainer.resume_from_path = scratch / "cut/global_step_3";
    other.trainer.default_local_dir = scratch / ("again" + std::to_string(tensor));
    testing::run_layout(size, other);
    return testing::masters(other.trainer.default_local_dir + "/global_step_4");
  };
  for (const auto& [size, tensor] : {std::pair<int64_t, int64_t>{1, 1}, {4, 4}}) {
    const Named loaded = again(size, tensor);
    for (const auto& [name, master] : saved) {
      EXPECT_TRUE(loaded.at(name).equal(master)) << name << " under " << tensor;
    }
  }
}

TEST(TensorRanks, KeysThatDoNotGoTogetherAreRefused) {
  const auto refusal = [](const std::function<void(Config&)>& change) {
    Config config = testing::tiny_config("", "");
    config.actor.megatron.tensor_model_parallel_size = 2;
    config.ref_tensor_model_parallel_size = 2;
    change(config);
    return testing::parallel_refusal(config);
  };
  EXPECT_NE(refusal([](Config& config) { config.ref_tensor_model_parallel_size = 1; })
                .find("actor_rollout_ref.ref.megatron.tensor_model_parallel_size: wanted the "
                      "actor's (2), got 1"),
            std::string::npos);
  EXPECT_NE(refusal([](Config& config) {
              config.sharing.verify = "first";
            }).find("actor_rollout_ref.sharing.verify: wanted off"),
            std::string::npos);
  EXPECT_NE(refusal([](Config&) {}).find("wanted a divisor of the number of processes (1), got 2"),
            std::string::npos);
}

}  // namespace banyan::train
