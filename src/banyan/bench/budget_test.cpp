// A whole benchmark batch under a token budget equal to its longest path: the gradients are those
// of the uncut batch, and what is alive at one time is bounded (specification A16 items 1 and 9).
#include <ATen/Parallel.h>
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "banyan/bench/workload.h"
#include "banyan/models/causal_lm.h"
#include "banyan/train/walk.h"

namespace banyan::bench {
namespace {

constexpr const char* kConfig =
    R"({"model_type": "llama", "vocab_size": 96, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
        "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.2})";
constexpr int64_t kKvElements = 2 * 1 * 8 * 2;  // K and V of one token, all layers

struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  train::WalkStats stats;
};

Outcome run(models::CausalLM& model, const trie::Plan& plan) {
  model.params().ensure_grads();
  model.params().zero_grads();
  Outcome outcome;
  outcome.stats =
      train::walk(model,
                  plan,
                  /*head=*/{},
                  train::LossScope::kSample,
                  [](const std::vector<int32_t>& samples, const train::TokenOutputs& outputs) {
                    train::TokenGradients gradients{at::full_like(outputs.value, 0.0), {}};
                    for (size_t k = 0; k < samples.size(); ++k) {
                      const int64_t begin = outputs.offsets[k];
                      gradients.value.narrow(0, begin, outputs.offsets[k + 1] - begin)
                          .fill_(samples[k] % 3 == 0 ? -0.5 : 1.0 + samples[k]);
                    }
                    return gradients;
                  });
  for (const Param& param : model.params().params()) {
    outcome.gradients[param.name] = param.grad.clone();
  }
  return outcome;
}

std::unique_ptr<models::CausalLM> model_of(at::ScalarType dtype) {
  return models::random_model(kConfig, 3, {.compute = {.dtype = dtype}, .with_backward = true});
}

trie::Plan plan_of(const std::vector<Sample>& samples, trie::Carry carry, int64_t budget) {
  trie::PlanOptions options;
  options.carry = carry;
  options.max_tokens_per_block = budget;
  return trie::plan(samples, options);
}

// The longest sample alone, all its tokens scored.
std::vector<Sample> longest_of(const std::vector<Sample>& samples) {
  Sample longest =
      *std::max_element(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) {
        return a.tokens.size() < b.tokens.size();
      });
  longest.scored.clear();
  return {longest};
}

// Most tokens that wait at one time with their K, V and gradients: those that blocks between their
// forward and their backward offer. A block may close one subtree and open the next; the first
// one's ancestors then live as long as the second's.
int64_t peak_live_ancestors(const trie::Plan& plan) {
  int64_t live = 0;
  int64_t peak = 0;
  for (const trie::Entry& entry : plan.entries) {
    const auto offered = static_cast<int64_t>(plan.blocks[entry.block].offered.size());
    if (entry.action == trie::Action::kForward) live += offered;
    peak = std::max(peak, live);
    if (entry.action == trie::Action::kBackward) live -= offered;
  }
  return peak;
}

class Budget : public ::testing::TestWithParam<const char*> {
 protected:
  Budget() : threads_(at::get_num_threads()) { at::set_num_threads(1); }
  ~Budget() override { at::set_num_threads(threads_); }

 private:
  int threads_;
};

TEST_P(Budget, OfTheLongestPathKeepsGradientsAndBoundsMemory) {
  const std::vector<Sample> samples = make_workload(GetParam(), 96, 3);
  const std::vector<Sample> longest = longest_of(samples);
  const auto budget = static_cast<int64_t>(longest[0].tokens.size());
  const auto fp64 = model_of(at::kDouble);
  const auto bf16 = model_of(at::kBFloat16);
  const Outcome uncut = run(*fp64, trie::plan(samples, {}));
  const Outcome alone = run(*bf16, trie::plan(longest, {}));
  for (const trie::Carry carry :
       {trie::Carry::kAuto, trie::Carry::kRetain, trie::Carry::kRecompute}) {
    const trie::Plan plan = plan_of(samples, carry, budget);
    EXPECT_GT(plan.blocks.size(), 1u);
    const Outcome cut = run(*fp64, plan);
    for (const auto& [name, want] : uncut.gradients) {
      const double error = cut.gradients.at(name).sub(want).norm().item<double>();
      EXPECT_LE(error, 1e-10 * want.norm().item<double>()) << name;
    }
    EXPECT_LE(cut.stats.peak_live_tokens, budget);
    if (carry == trie::Carry::kAuto) continue;  // it may replay
    EXPECT_EQ(plan.num_computed, plan.num_unique);
    const train::WalkStats stats = run(*bf16, plan).stats;
    EXPECT_LE(stats.peak_activation_bytes, alone.stats.peak_activation_bytes);
    EXPECT_LE(stats.peak_carry_bytes, peak_live_ancestors(plan) * kKvElements * (2 + 4));
    EXPECT_LE(peak_live_ancestors(plan), 2 * budget);
  }
}

INSTANTIATE_TEST_SUITE_P(Presets, Budget, ::testing::Values("turns10n8", "tree-b2d4", "P512R64n8"));

}  // namespace
}  // namespace banyan::bench
