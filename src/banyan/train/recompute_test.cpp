// Activation recompute: the bits of the gradients with and without, and what it saves.
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <map>

#include "banyan/models/test_models.h"
#include "banyan/testing/one_thread.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/tensor_bytes.h"
#include "banyan/train/walk.h"

namespace banyan::train {
namespace {

using nn::Recompute;
using nn::RecomputeMethod;

// A configuration of models/test_models.h with another number of layers.
std::string with_layers(std::string config, int64_t layers) {
  const std::string before = R"("num_hidden_layers": 2)";
  return config.replace(
      config.find(before), before.size(), R"("num_hidden_layers": )" + std::to_string(layers));
}

struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  std::map<int32_t, at::Tensor> value;  // per sample
  WalkStats stats;
};

Outcome run(models::CausalLM& model, const trie::Plan& plan) {
  Outcome outcome;
  model.params().ensure_grads();
  model.params().zero_grads();
  outcome.stats = walk(model,
                       plan,
                       {.temperature = 0.7, .with_entropy = true},
                       LossScope::kSample,
                       [&](const std::vector<int32_t>& samples, const TokenOutputs& outputs) {
                         TokenGradients gradients{at::full_like(outputs.value, 0.25), {}};
                         if (outputs.entropy.defined()) {
                           gradients.entropy = at::full_like(outputs.entropy, -0.5);
                         }
                         for (size_t k = 0; k < samples.size(); ++k) {
                           const int64_t begin = outputs.offsets[k];
                           const int64_t length = outputs.offsets[k + 1] - begin;
                           outcome.value[samples[k]] =
                               outputs.value.narrow(0, begin, length).clone();
                           gradients.value.narrow(0, begin, length).fill_(0.5 - samples[k] % 3);
                         }
                         return gradients;
                       });
  for (const Param& param : model.params().params()) {
    outcome.gradients[param.name] = param.grad.clone();
  }
  return outcome;
}

std::vector<Recompute> all_ways() {
  return {{.method = RecomputeMethod::kUniform, .num_layers = 1},
          {.method = RecomputeMethod::kUniform, .num_layers = 2},
          {.method = RecomputeMethod::kUniform, .num_layers = 9},
          {.method = RecomputeMethod::kBlock, .num_layers = 2},
          {.method = RecomputeMethod::kBlock, .num_layers = 9},
          {.method = RecomputeMethod::kSelective, .core_attn = true},
          {.method = RecomputeMethod::kSelective, .mlp = true},
          {.method = RecomputeMethod::kSelective, .core_attn = true, .mlp = true},
          {.method = RecomputeMethod::kSelective, .moe = true},
          {.method = RecomputeMethod::kSelective}};
}

// Uncut, and cut with a carry that retains or runs whole blocks again.
std::vector<trie::Plan> some_plans(const std::vector<Sample>& samples) {
  std::vector<trie::Plan> plans = {trie::plan(samples, {})};
  for (const trie::CarryPolicy policy :
       {trie::CarryPolicy::kRetain, trie::CarryPolicy::kRecompute}) {
    plans.push_back(trie::plan_with_cuts(samples, {3, 6, 8, 12}, policy));
  }
  return plans;
}

TEST(Recompute, GivesTheBitsOfKeeping) {
  const testing::OneThread one_thread;
  struct Case {
    size_t config;  // 1: biases; 4: norms of queries and keys; 5: experts
    models::HeadKind head;
  };
  const std::vector<trie::Plan> plans = some_plans(testing::toy_samples());
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
    for (const Case& c : {Case{1, models::HeadKind::kVocabulary},
                          Case{4, models::HeadKind::kVocabulary},
                          Case{5, models::HeadKind::kVocabulary},
                          Case{4, models::HeadKind::kValue}}) {
      const auto model =
          models::random_model(with_layers(models::tiny_configs()[c.config].second, 5),
                               /*seed=*/7,
                               {.compute = {.dtype = dtype}, .head = c.head});
      for (const trie::Plan& plan : plans) {
        model->set_recompute({});
        const Outcome kept = run(*model, plan);
        for (const Recompute& way : all_ways()) {
          model->set_recompute(way);
          const Outcome again = run(*model, plan);
          for (const auto& [name, gradient] : kept.gradients) {
            EXPECT_TRUE(gradient.equal(again.gradients.at(name))) << name;
          }
          for (const auto& [sample, value] : kept.value) {
            EXPECT_TRUE(value.equal(again.value.at(sample))) << sample;
          }
        }
      }
    }
  }
}

TEST(Recompute, UnitsCoverTheLayers) {
  const Recompute uniform{.method = RecomputeMethod::kUniform, .num_layers = 3};
  EXPECT_EQ(uniform.unit_of(0), 0);
  EXPECT_EQ(uniform.unit_of(5), 3);
  EXPECT_EQ(uniform.unit_of(6), 6);
  EXPECT_EQ(uniform.num_units(7), 3);
  EXPECT_EQ(uniform.num_in_units(7), 7);
  EXPECT_EQ(uniform.largest_unit(2), 2);
  const Recompute block{.method = RecomputeMethod::kBlock, .num_layers = 2};
  EXPECT_EQ(block.unit_of(1), 1);
  EXPECT_EQ(block.unit_of(2), -1);
  EXPECT_EQ(block.num_in_units(7), 2);
  EXPECT_EQ(Recompute{}.unit_of(0), -1);
  EXPECT_EQ(Recompute{}.largest_unit(7), 0);
}

// Qwen2.5-0.5B's proportions (hidden 896, kv width 128, feed-forward 4864), an eighth as wide.
std::string small_config(int64_t layers) {
  return R"({"model_type": "qwen2", "vocab_size": 64, "hidden_size": 112, "intermediate_size": 608,
             "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16,
             "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": true,
             "num_hidden_layers": )" +
         std::to_string(layers) + "}";
}

constexpr int64_t kTokens = 512;

std::vector<Sample> one_path() {
  std::vector<int32_t> tokens;
  for (int32_t t = 0; t < kTokens; ++t) tokens.push_back(t * 7 % 64);
  return testing::samples_from({tokens});
}

struct Memory {
  int64_t stated = 0;    // by the walk
  int64_t measured = 0;  // of all tensors that the pass allocates
};

Memory memory_of(int64_t layers, const Recompute& way) {
  const auto model = models::random_model(small_config(layers), 7, {});
  model->set_recompute(way);
  const trie::Plan plan = trie::plan(one_path(), {});
  run(*model, plan);  // allocates the gradients
  Memory memory;
  const testing::TensorBytes bytes;
  memory.stated = walk(*model,
                       plan,
                       {},
                       LossScope::kSample,
                       [](const std::vector<int32_t>&, const TokenOutputs& outputs) {
                         return TokenGradients{at::full_like(outputs.value, 1.0), {}};
                       })
                      .peak_activation_bytes;
  memory.measured = bytes.peak();
  return memory;
}

// Per layer, from 4 and 8 layers.
Memory growth_of(const Recompute& way) {
  const Memory few = memory_of(4, way);
  const Memory many = memory_of(8, way);
  return {(many.stated - few.stated) / 4, (many.measured - few.measured) / 4};
}

TEST(Recompute, AnAddedLayerTakesAFewPercentOfItsActivations) {
  const testing::OneThread one_thread;
  const Memory whole = growth_of({});
  EXPECT_EQ(whole.stated, whole.measured);
  for (const int64_t num_layers : {1, 2}) {
    const Memory grown = growth_of({.method = RecomputeMethod::kUniform, .num_layers = num_layers});
    const double bound = 0.08 / static_cast<double>(num_layers);
    EXPECT_EQ(grown.stated, grown.measured);
    EXPECT_GT(grown.measured, 0);
    EXPECT_LE(static_cast<double>(grown.measured), bound * static_cast<double>(whole.measured));
  }
}

TEST(Recompute, BlockLeavesTheLaterLayersWhole) {
  const testing::OneThread one_thread;
  const Recompute way{.method = RecomputeMethod::kBlock, .num_layers = 3};
  EXPECT_EQ(growth_of(way).measured, growth_of({}).measured);
  EXPECT_LT(memory_of(8, way).measured, memory_of(8, {}).measured);
}

TEST(Recompute, SelectiveDropsWhatItNames) {
  const testing::OneThread one_thread;
  const int64_t whole = growth_of({}).measured;
  const auto saved = [&](bool core_attn, bool mlp) {
    return whole -
           growth_of({.method = RecomputeMethod::kSelective, .core_attn = core_attn, .mlp = mlp})
               .measured;
  };
  const int64_t core_attn = kTokens * (7 * 16 * 2 + 7 * 4);
  const int64_t mlp = kTokens * 2 * 608 * 2;
  EXPECT_EQ(saved(true, false), core_attn);
  EXPECT_EQ(saved(false, true), mlp);
  EXPECT_EQ(saved(true, true), core_attn + mlp);
  EXPECT_EQ(saved(false, false), 0);
}

// nn/activation_bytes.h is what the walk states, and bounds what the pass allocates.
TEST(Recompute, BytesPerTokenAreThoseOfThePass) {
  const testing::OneThread one_thread;
  for (const Recompute& way : all_ways()) {
    const auto model = models::random_model(small_config(6), 7, {});
    model->set_recompute(way);
    const nn::ActivationBytes bytes = model->activation_bytes();
    const Memory memory = memory_of(6, way);
    const int64_t rows = kTokens * 112 * 2;  // [R, E] of the head, R = T - 1
    EXPECT_EQ(memory.stated, kTokens * (bytes.kept + bytes.again) + rows - 112 * 2);
    EXPECT_LE(memory.measured, kTokens * bytes.total() + 4 * rows);
    // First layers run again when those behind them are through.
    const bool at_once = way.method != RecomputeMethod::kBlock;
    EXPECT_GE(memory.measured, kTokens * (bytes.kept + (at_once ? bytes.again : 0)));
  }
}

// What entropy_from_logits_with_chunking is for: rows of logits are no part of what a batch takes.
TEST(Recompute, LogitsNeverExistAsAWhole) {
  const testing::OneThread one_thread;
  constexpr int64_t kVocab = 4096;
  const std::string config =
      R"({"model_type": "llama", "vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16,
          "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1,
          "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": true})";
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    const auto model = models::random_model(config, 7, {.compute = {.dtype = dtype}});
    const auto peak_of = [&](int32_t rows) {
      std::vector<std::vector<int32_t>> samples;  // many short ones: the score matrix is no part
      for (int32_t s = 0; s < rows / 8; ++s) {
        samples.emplace_back();
        for (int32_t t = 0; t < 9; ++t) samples.back().push_back((s * 9 + t) % kVocab);
      }
      const trie::Plan plan = trie::plan(testing::samples_from(samples), {});
      run(*model, plan);
      const testing::TensorBytes bytes;
      run(*model, plan);
      return bytes.peak();
    };
    const int64_t grown = peak_of(1024) - peak_of(512);
    EXPECT_LT(grown, 512 * kVocab) << dtype;  // a byte of each logit would be more
  }
}

}  // namespace
}  // namespace banyan::train
