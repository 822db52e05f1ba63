// A plan's cuts, policies and scopes do not change losses, gradients or forward bits.
#include "banyan/train/walk.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "banyan/core/rng.h"
#include "banyan/models/test_models.h"
#include "banyan/testing/one_thread.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/walk_run.h"

namespace banyan::train {
namespace {

using models::tiny_configs;
using trie::CarryPolicy;

using testing::dense_plan;
using testing::kBf16;
using testing::kFp32;
using testing::kFp64;
using testing::kHead;
using testing::kVocab;
using testing::largest_error;
using testing::model_of;
using testing::Outcome;
using testing::run;

void expect_same_bits(const std::map<std::string, at::Tensor>& a,
                      const std::map<std::string, at::Tensor>& b) {
  for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
}

void expect_same_numbers(const Outcome& a, const Outcome& b) {
  ASSERT_EQ(a.value.size(), b.value.size());
  for (const auto& [sample, value] : a.value) {
    EXPECT_TRUE(value.equal(b.value.at(sample))) << sample;
    EXPECT_TRUE(a.entropy.at(sample).equal(b.entropy.at(sample))) << sample;
  }
}

std::vector<std::vector<int32_t>> some_cuts(const std::string& name, int32_t num_tokens) {
  std::vector<std::vector<int32_t>> out;
  if (name == "toy") out = {{3, 6, 8, 12}, {1, 2, 3, 4, 5, 9, 13}, {6}, {2, 11}, {3}};
  for (uint64_t round = 0; round < 2; ++round) {
    std::vector<int32_t> cuts;
    for (int32_t t = 1; t < num_tokens; ++t) {
      if (philox(round, static_cast<uint64_t>(t), 9)[0] % (round == 0 ? 37 : 11) == 0) {
        cuts.push_back(t);
      }
    }
    out.push_back(cuts);
  }
  return out;
}

int32_t unique_tokens(const std::vector<Sample>& samples) {
  return trie::build(samples).num_tokens();
}

TEST(Walk, GradientsOfCutPlansEqualDenseOnes) {
  const testing::OneThread one_thread;
  size_t which = 0;
  for (const testing::TrieCase& c : testing::trie_cases(5, kVocab)) {
    ++which;
    for (const ComputeOptions& options : {kFp64, kFp32}) {
      if (options.dtype == at::kFloat && which % 4 != 0) continue;
      const auto model = model_of(which, options);
      const Outcome dense = run(*model, dense_plan(c.samples));
      const double bound = options.dtype == at::kDouble ? 1e-10 : 1e-5;
      for (const auto& cuts : some_cuts(c.name, unique_tokens(c.samples))) {
        for (const CarryPolicy policy : {CarryPolicy::kRetain, CarryPolicy::kRecompute}) {
          const trie::Plan plan = trie::plan_with_cuts(c.samples, cuts, policy);
          ASSERT_EQ(plan.blocks.size(), cuts.size() + 1);
          const Outcome got = run(*model, plan);
          EXPECT_LE(largest_error(got, dense), bound) << c.name;
          EXPECT_NEAR(got.loss, dense.loss, bound * std::max(1.0, std::abs(dense.loss))) << c.name;
          EXPECT_EQ(got.stats.num_recomputed, plan.num_recomputed);
        }
      }
    }
  }
}

TEST(Walk, ForwardBitsDoNotDependOnTheCutAndRecomputingGivesTheBitsOfRetaining) {
  const testing::OneThread one_thread;
  size_t which = 0;
  for (const testing::TrieCase& c : testing::trie_cases(5, kVocab)) {
    if (++which % 2 == 0 && c.name != "toy") continue;
    const auto model = model_of(which / 2, kBf16);
    const Outcome uncut = run(*model, trie::plan(c.samples, {}));
    for (const auto& cuts : some_cuts(c.name, unique_tokens(c.samples))) {
      const Outcome retained =
          run(*model, trie::plan_with_cuts(c.samples, cuts, CarryPolicy::kRetain));
      const Outcome recomputed =
          run(*model, trie::plan_with_cuts(c.samples, cuts, CarryPolicy::kRecompute));
      expect_same_numbers(retained, uncut);
      expect_same_numbers(recomputed, uncut);
      expect_same_bits(recomputed.gradients, retained.gradients);
    }
  }
}

TEST(Walk, RepeatedRunsAndThreadCountsGiveEqualBits) {
  const testing::TrieCase c = testing::trie_cases(5, kVocab)[5];  // long_trunk
  const int threads = at::get_num_threads();
  const auto model = model_of(4, kBf16);
  const trie::Plan plan =
      trie::plan_with_cuts(c.samples, {60, 140, 170, 200, 260}, CarryPolicy::kRecompute);
  std::vector<Outcome> outcomes;
  for (const int count : {1, 2, 2}) {
    at::set_num_threads(count);
    outcomes.push_back(run(*model, plan));
  }
  at::set_num_threads(threads);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.loss, outcomes[0].loss);
    expect_same_bits(outcome.gradients, outcomes[0].gradients);
  }
}

// Whatever the budget is and however a cut trunk is treated (A12 rule 6).
TEST(Walk, LossAndGradientsDoNotDependOnTheBudget) {
  const testing::OneThread one_thread;
  size_t which = 0;
  for (const testing::TrieCase& c : testing::trie_cases(9, kVocab)) {
    const auto model = model_of(++which, kFp64);
    const Outcome dense = run(*model, dense_plan(c.samples));
    int64_t longest = 0;
    for (const Sample& sample : c.samples) {
      longest = std::max<int64_t>(longest, static_cast<int64_t>(sample.tokens.size()));
    }
    for (const trie::Carry carry : {trie::Carry::kAuto,
                                    trie::Carry::kRetain,
                                    trie::Carry::kRecompute,
                                    trie::Carry::kReplay}) {
      trie::PlanOptions options;
      options.carry = carry;
      const auto pick = philox(which, static_cast<uint64_t>(carry), 5)[0];
      options.max_tokens_per_block = longest + pick % 9;
      if (carry != trie::Carry::kReplay && pick % 2 == 0) {
        options.max_tokens_per_block = std::max<int64_t>(2, longest / 2);
      }
      const Outcome got = run(*model, trie::plan(c.samples, options));
      EXPECT_LE(largest_error(got, dense), 1e-10) << c.name;
      EXPECT_NEAR(got.loss, dense.loss, 1e-10) << c.name;
    }
  }
}

// A16 item 9: with the budget of the longest path, what is alive at one time is at most the
// activations of that path and the K, V and gradients of its tokens.
TEST(Walk, ABudgetOfTheLongestPathBoundsTheMemory) {
  testing::RandomTrieOptions shape;
  shape.vocab = kVocab;
  shape.depth = 5;
  shape.max_fan_out = 3;
  shape.max_segment = 24;
  shape.max_samples = 40;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    shape.seed = seed;
    const std::vector<Sample> samples = testing::random_samples(shape);
    Sample longest =
        *std::max_element(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) {
          return a.tokens.size() < b.tokens.size();
        });
    longest.scored.clear();
    const auto model = model_of(4, kBf16);
    const WalkStats alone = run(*model, trie::plan({longest}, {})).stats;
    const auto budget = static_cast<int64_t>(longest.tokens.size());
    const models::ModelShape& sizes = model->shape();
    const int64_t kv_bytes = sizes.layers * sizes.kv_heads * sizes.head_dim * 2 * (2 + 4);
    for (const trie::Carry carry : {trie::Carry::kRetain, trie::Carry::kRecompute}) {
      trie::PlanOptions options;
      options.carry = carry;
      options.max_tokens_per_block = budget;
      const trie::Plan plan = trie::plan(samples, options);
      const WalkStats stats = run(*model, plan).stats;
      EXPECT_GT(plan.blocks.size(), 1u);
      EXPECT_EQ(plan.num_computed, plan.num_unique);
      EXPECT_LE(stats.peak_live_tokens, budget);
      EXPECT_LE(stats.peak_activation_bytes, alone.peak_activation_bytes);
      EXPECT_GT(stats.peak_carry_bytes, 0);
      EXPECT_LE(stats.peak_carry_bytes, budget * kv_bytes);
    }
    EXPECT_GT(run(*model, trie::plan(samples, {})).stats.peak_live_tokens, 2 * budget);
  }
}

// A16 item 3: samples in another order (each keeps its uid) give the same bits.
TEST(Walk, PermutedSamplesGiveEqualBits) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : testing::trie_cases(5, kVocab)) {
    if (c.name != "duplicates" && c.name != "mixed_0" && c.name != "masks_differ") continue;
    const auto model = model_of(2, kBf16);
    trie::PlanOptions options;
    options.max_tokens_per_block = 24;
    const Outcome wanted = run(*model, trie::plan(c.samples, options));
    std::vector<Sample> permuted;
    std::vector<int32_t> ids;
    for (size_t s = c.samples.size(); s-- > 0;) {
      permuted.push_back(c.samples[s]);
      ids.push_back(static_cast<int32_t>(s));
    }
    const Outcome got = run(*model, trie::plan(permuted, options), LossScope::kSample, ids);
    expect_same_bits(got.gradients, wanted.gradients);
  }
}

TEST(Walk, AMiniBatchScopeIsOneCallWhateverTheCut) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : testing::trie_cases(5, kVocab)) {
    if (c.name != "toy" && c.name != "masks_differ" && c.name != "empty_response") continue;
    const auto model = model_of(3, kFp64);
    const Outcome dense = run(*model, dense_plan(c.samples), LossScope::kMiniBatch);
    EXPECT_EQ(dense.stats.num_scored_before, 0);
    const std::vector<std::vector<int32_t>> all_cuts = some_cuts(c.name, unique_tokens(c.samples));
    for (const auto& cuts : all_cuts) {
      const trie::Plan plan = trie::plan_with_cuts(c.samples, cuts, CarryPolicy::kRetain);
      const Outcome got = run(*model, plan, LossScope::kMiniBatch);
      EXPECT_EQ(got.num_calls, 1);
      EXPECT_LE(largest_error(got, dense), 1e-10) << c.name;
      EXPECT_NEAR(got.loss, dense.loss, 1e-10);
    }
    const Outcome cut = run(*model,
                            trie::plan_with_cuts(c.samples, all_cuts.back(), CarryPolicy::kRetain),
                            LossScope::kMiniBatch);
    EXPECT_EQ(cut.stats.num_scored_before, unique_tokens(c.samples));
  }
}

TEST(Walk, ValuesOfAValueHeadAndTheirGradientsDoNotDependOnTheCut) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : testing::trie_cases(5, kVocab)) {
    if (c.name != "toy" && c.name != "depth_6") continue;
    const auto model = model_of(0, kFp64, models::HeadKind::kValue);
    const Outcome dense = run(*model, dense_plan(c.samples));
    EXPECT_GT(dense.gradients.at("score.weight").norm().item<double>(), 0.0);
    for (const auto& cuts : some_cuts(c.name, unique_tokens(c.samples))) {
      const Outcome got =
          run(*model, trie::plan_with_cuts(c.samples, cuts, CarryPolicy::kRecompute));
      EXPECT_LE(largest_error(got, dense), 1e-10) << c.name;
      for (const auto& [sample, value] : dense.value) {
        EXPECT_TRUE(value.allclose(got.value.at(sample), 1e-12, 1e-12));
      }
    }
  }
}

TEST(Walk, ScoresAreTheNumbersOfTheWalk) {
  const std::vector<Sample> samples = testing::toy_samples();
  const auto model = model_of(1, kBf16);
  const Outcome uncut = run(*model, trie::plan(samples, {}));
  HeadSpec head = kHead;
  head.with_sum_squares = true;
  trie::PlanOptions scoring;
  scoring.for_backward = false;
  for (const std::vector<int32_t>& cuts : {std::vector<int32_t>{}, {3, 6, 8, 12}, {1, 2, 9}}) {
    const SampleScores scores = score_samples(
        *model, trie::plan_with_cuts(samples, cuts, CarryPolicy::kRetain, scoring), head);
    const std::vector<at::Tensor> logits = sample_logits(*model, samples, /*share=*/false);
    for (size_t s = 0; s < samples.size(); ++s) {
      EXPECT_TRUE(scores.value[s].equal(uncut.value.at(static_cast<int32_t>(s))));
      EXPECT_TRUE(scores.entropy[s].equal(uncut.entropy.at(static_cast<int32_t>(s))));
      const at::Tensor rows = logits[s].narrow(0, 0, logits[s].size(0) - 1).to(at::kDouble);
      const at::Tensor wanted = rows.div(kHead.temperature).softmax(1).square().sum({1});
      EXPECT_TRUE(scores.sum_squares[s].to(at::kDouble).allclose(wanted, 1e-5, 1e-7));
    }
  }
}

// A16 item 4: another branch's tokens touch neither the numbers of a branch nor, by its gradient,
// anything off its own path.
TEST(Walk, BranchesDoNotTouchEachOther) {
  std::vector<Sample> samples = testing::toy_samples();
  const auto model = model_of(1, kBf16);  // untied: embedding rows are tokens' own
  const auto plan_of = [](const std::vector<Sample>& batch) {
    return trie::plan_with_cuts(batch, {2, 5, 7, 9}, CarryPolicy::kRetain);
  };
  const Outcome before = run(*model, plan_of(samples));
  // Samples 1 and 4 are [1 2 3 4 9 10]; the new tokens keep the shape and the order of the trie.
  for (const int32_t s : {1, 4}) {
    samples[s].tokens[4] = 20;
    samples[s].tokens[5] = 21;
  }
  const Outcome after = run(*model, plan_of(samples));
  for (const int32_t s : {0, 2, 3, 5, 6})
    EXPECT_TRUE(before.value.at(s).equal(after.value.at(s))) << s;
  EXPECT_FALSE(before.value.at(1).equal(after.value.at(1)));

  model->params().zero_grads();
  walk(*model,
       plan_of(samples),
       kHead,
       LossScope::kSample,
       [&](const std::vector<int32_t>& which, const TokenOutputs& outputs) {
         TokenGradients gradients{at::zeros_like(outputs.value), {}};
         for (size_t k = 0; k < which.size(); ++k) {
           if (which[k] != 1 && which[k] != 4) continue;
           const int64_t begin = outputs.offsets[k];
           gradients.value.narrow(0, begin, outputs.offsets[k + 1] - begin).fill_(1.0);
         }
         return gradients;
       });
  const at::Tensor rows = model->params().at("model.embed_tokens.weight").grad.abs().sum({1});
  for (const int32_t token : {1, 2, 3, 4, 20}) EXPECT_GT(rows[token].item<double>(), 0.0) << token;
  for (const int32_t token : {5, 6, 7, 8, 11, 12, 13, 14, 15}) {
    EXPECT_EQ(rows[token].item<double>(), 0.0) << token;
  }
}

TEST(Walk, ANanOfOneSampleReachesOnlyNodesOnItsPath) {
  const std::vector<Sample> samples = testing::toy_samples();
  const auto model = model_of(1, kBf16);
  model->params().ensure_grads();
  model->params().zero_grads();
  walk(*model,
       trie::plan_with_cuts(samples, {2, 5, 7, 9, 11}, CarryPolicy::kRecompute),
       kHead,
       LossScope::kSample,
       [&](const std::vector<int32_t>& which, const TokenOutputs& outputs) {
         TokenGradients gradients{at::full_like(outputs.value, 1.0), {}};
         for (size_t k = 0; k < which.size(); ++k) {
           if (which[k] == 6) {
             gradients.value.narrow(0, outputs.offsets[k], 4).fill_(std::nan(""));
           }
         }
         return gradients;
       });
  const at::Tensor rows = model->params().at("model.embed_tokens.weight").grad.isnan().any(1);
  for (const int32_t token : {12, 13, 15}) EXPECT_TRUE(rows[token].item<bool>()) << token;
  for (const int32_t token : {3, 4, 5, 6, 7, 9}) EXPECT_FALSE(rows[token].item<bool>()) << token;
}

}  // namespace
}  // namespace banyan::train
