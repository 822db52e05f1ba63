// The engine on a small random decoder: what batch-mates, limits, chunks, preemption and sharing
// must not change, and that its log-probabilities are those of scoring, bit for bit.
#include "banyan/rollout/engine.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "banyan/ops/paged_attention.h"
#include "banyan/rollout/test_support.h"

namespace banyan::rollout {
namespace {

TEST(Engine, APromptIsComputedOncePerGroup) {
  const auto prompts = make_prompts(/*count=*/1, /*trunk=*/100, /*n=*/8);
  const Result result = generate(shared_model(), prompts, make_params(6));
  EXPECT_EQ(result.trajectories.size(), 8u);
  EXPECT_EQ(result.stats.computed_prompt_tokens, 105);
  EXPECT_EQ(result.stats.logical_prompt_tokens, 8 * 105);
  const Result alone = generate(shared_model(), prompts, make_params(6), {.share_prefix = false});
  EXPECT_EQ(alone.stats.computed_prompt_tokens, 8 * 105);
  expect_same(alone, result, "share off");
}

TEST(Engine, GroupsShareWholePages) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/130, /*n=*/2);
  const Result result = generate(shared_model(), prompts, make_params(4));
  // Two whole pages once; 2 + 5, 2 + 16, 2 + 27 tokens of their own.
  EXPECT_EQ(result.stats.computed_prompt_tokens, 128 + 7 + 18 + 29);
}

TEST(Engine, NothingAroundASampleChangesIt) {
  const auto prompts = make_prompts(/*count=*/4, /*trunk=*/70, /*n=*/4);
  SamplingParams params = make_params(80);
  const Result base = generate(shared_model(), prompts, params);
  ASSERT_EQ(base.trajectories.size(), 16u);
  EXPECT_EQ(base.stats.num_preemptions, 0);
  std::set<std::vector<int32_t>> distinct;
  for (const auto& [key, t] : base.trajectories) distinct.insert(t.response);
  EXPECT_GT(distinct.size(), 12u);

  const std::vector<std::pair<std::string, EngineOptions>> variants = {
      {"share off", {.share_prefix = false}},
      {"one token a pass", {.max_num_batched_tokens = 1}},
      {"chunks of 5", {.max_num_batched_tokens = 5}},
      {"chunks of 64", {.max_num_batched_tokens = 64}},
      {"one sequence", {.max_num_seqs = 1}},
      {"three sequences", {.max_num_seqs = 3}},
      {"whole prompts", {.max_num_batched_tokens = 120, .enable_chunked_prefill = false}},
      {"share off, three sequences", {.max_num_seqs = 3, .share_prefix = false}},
  };
  for (const auto& [name, options] : variants) {
    const Result result = generate(shared_model(), prompts, params, options);
    EXPECT_EQ(result.trajectories.size(), 16u) << name;
    expect_same(result, base, name);
  }
  const std::vector<Prompt> reversed(prompts.rbegin(), prompts.rend());
  expect_same(generate(shared_model(), reversed, params), base, "reversed");
  expect_same(generate(shared_model(), {prompts[2]}, params), base, "alone");
}

TEST(Engine, OneAndTwoThreadsGiveTheSameBits) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/70, /*n=*/3);
  SamplingParams params = make_params(40);
  params.top_p = 0.95;
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Result one = generate(shared_model(), prompts, params);
  at::set_num_threads(2);
  const Result two = generate(shared_model(), prompts, params);
  at::set_num_threads(before);
  expect_same(two, one, "two threads");
}

TEST(Engine, ATinyPoolPreemptsAndChangesNothing) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/40, /*n=*/4);
  SamplingParams params = make_params(180);
  params.eos_ids = {7};
  const Result base = generate(shared_model(), prompts, params);
  const auto& shape = shared_model().shape();
  const int64_t page = ops::KvPool::page_bytes(
      shape.layers, shape.kv_heads, shape.head_dim, shared_model().options());
  int64_t preemptions = 0;
  for (const int64_t pages : {5, 6, 7, 9, 11, 14}) {
    const Result result = generate(shared_model(), prompts, params, {.kv_bytes = pages * page});
    expect_same(result, base, "pool of " + std::to_string(pages));
    EXPECT_EQ(result.trajectories.size(), base.trajectories.size());
    preemptions += result.stats.num_preemptions;
  }
  EXPECT_GT(preemptions, 0);
}

// A CPU has no other memory to spill to unless it is asked for: the mechanism is the same.
TEST(Engine, SpilledPagesComeBackAndChangeNothing) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/40, /*n=*/4);
  SamplingParams params = make_params(180);
  params.eos_ids = {7};
  const Result base = generate(shared_model(), prompts, params);
  const auto& shape = shared_model().shape();
  const int64_t page = ops::KvPool::page_bytes(
      shape.layers, shape.kv_heads, shape.head_dim, shared_model().options());
  int64_t spilled = 0;
  int64_t restored = 0;
  for (const int64_t pages : {8, 9, 11, 13}) {
    Engine engine(shared_model(), {.kv_bytes = pages * page, .host_kv_bytes = 30 * page});
    Result result;
    engine.generate(prompts, params, [&](Trajectory&& t) {
      result.trajectories.emplace(Key{t.row, t.index}, t);
    });
    expect_same(result, base, "pool of " + std::to_string(pages));
    EXPECT_EQ(result.trajectories.size(), base.trajectories.size());
    const auto counters = engine.stats().counters;
    restored += counters.at("restored_pages");
    EXPECT_EQ(counters.at("recomputed_tokens"), 0);
    spilled += counters.at("spilled_pages");
  }
  EXPECT_GT(spilled, 0);
  EXPECT_GT(restored, 0) << "what the tree does not have any more";
}

TEST(Engine, LogprobsAreThoseOfScoringBitForBit) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/90, /*n=*/4);
  for (const double temperature : {1.0, 0.7, 0.0}) {
    SamplingParams params = make_params(70);
    params.temperature = temperature;
    params.top_p = 0.9;
    params.top_k = 50;
    const Result result = generate(shared_model(), prompts, params);
    const auto scored = score(shared_model(), result, temperature > 0 ? temperature : 1.0);
    for (const auto& [key, t] : result.trajectories) {
      EXPECT_EQ(t.rollout_log_probs, scored.at(key)) << "T " << temperature;
    }
  }
}

// T29: the law that drew a token is renormalised over what top-k and top-p kept.
TEST(Engine, StoresTheLawThatDrewTheTokenBesideTheFullSoftmax) {
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/40, /*n=*/2);
  SamplingParams params = make_params(20);
  const auto gap = [&](int32_t top_k, double top_p) {
    params.top_k = top_k;
    params.top_p = top_p;
    double largest = 0.0;
    for (const auto& [key, t] : generate(shared_model(), prompts, params).trajectories) {
      EXPECT_EQ(t.sampled_log_probs.size(), t.response.size());
      for (size_t i = 0; i < t.sampled_log_probs.size(); ++i) {
        EXPECT_GE(t.sampled_log_probs[i], t.rollout_log_probs[i]);
        EXPECT_LE(t.sampled_log_probs[i], 1e-5f);
        if (top_k == 1) {
          EXPECT_NEAR(t.sampled_log_probs[i], 0.0f, 1e-5);
        }
        largest = std::max(largest, double{t.sampled_log_probs[i]} - t.rollout_log_probs[i]);
      }
    }
    return largest;
  };
  EXPECT_GT(gap(1, 1.0), 0.5);
  EXPECT_GT(gap(20, 1.0), 0.01);
  const double nucleus = gap(-1, 0.8);
  EXPECT_GT(nucleus, 0.01);
  EXPECT_LE(nucleus, -std::log(0.8) + 1e-4);  // at least 0.8 of the mass was kept
  params.top_k = -1;
  params.top_p = 1.0;
  for (const auto& [key, t] : generate(shared_model(), prompts, params).trajectories) {
    EXPECT_TRUE(t.sampled_log_probs.empty());
  }
}

TEST(Engine, PlainOperatorsAgreeWithScoring) {
  const auto model = tiny_model({.dtype = at::kFloat, .kernels = Kernels::kAten});
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/70, /*n=*/3);
  const Result result = generate(*model, prompts, make_params(30));
  const auto scored = score(*model, result, 1.0);
  for (const auto& [key, t] : result.trajectories) {
    for (size_t i = 0; i < t.response.size(); ++i) {
      EXPECT_NEAR(t.rollout_log_probs[i], scored.at(key)[i], 1e-4);
    }
  }
}

TEST(Engine, TopOneIsGreedy) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/10, /*n=*/2);
  SamplingParams params = make_params(40);
  params.temperature = 0.0;
  const Result greedy = generate(shared_model(), prompts, params);
  params.temperature = 1.0;
  params.top_k = 1;
  expect_same(generate(shared_model(), prompts, params), greedy, "top_k = 1");
  for (const Prompt& prompt : prompts) {
    EXPECT_EQ(greedy.trajectories.at({prompt.row, 0}).response,
              greedy.trajectories.at({prompt.row, 1}).response);
  }
}

TEST(Engine, NoiseBelongsToSeedStepRowAndIndex) {
  std::vector<Prompt> prompts = make_prompts(/*count=*/1, /*trunk=*/10, /*n=*/2);
  SamplingParams params = make_params(30);
  const Result base = generate(shared_model(), prompts, params);
  const auto& first = base.trajectories.at({100, 0}).response;
  EXPECT_NE(first, base.trajectories.at({100, 1}).response);
  params.step += 1;
  EXPECT_NE(first, generate(shared_model(), prompts, params).trajectories.at({100, 0}).response);
  params.step -= 1;
  params.seed += 1;
  EXPECT_NE(first, generate(shared_model(), prompts, params).trajectories.at({100, 0}).response);
  params.seed -= 1;
  prompts[0].row = 101;
  EXPECT_NE(first, generate(shared_model(), prompts, params).trajectories.at({101, 0}).response);
}

TEST(Engine, StopIdsAreKeptAndEndTheResponse) {
  const auto prompts = make_prompts(/*count=*/4, /*trunk=*/10, /*n=*/8);
  SamplingParams params = make_params(60);
  const Result result = generate(shared_model(), prompts, params);
  const auto is_stop = [](int32_t id) { return id >= 7 && id <= 9; };
  int stopped = 0;
  for (const auto& [key, t] : result.trajectories) {
    ASSERT_FALSE(t.response.empty());
    const auto first = std::find_if(t.response.begin(), t.response.end(), is_stop);
    if (t.finish == FinishReason::kStop) {
      EXPECT_EQ(first, t.response.end() - 1);
      ++stopped;
    } else {
      EXPECT_EQ(t.finish, FinishReason::kLength);
      EXPECT_EQ(first, t.response.end());
      EXPECT_EQ(t.response.size(), 60u);
    }
  }
  EXPECT_GT(stopped, 0);

  params.ignore_eos = true;
  for (const auto& [key, t] : generate(shared_model(), prompts, params).trajectories) {
    EXPECT_EQ(t.response.size(), 60u);
    EXPECT_EQ(t.finish, FinishReason::kLength);
    const auto& shorter = result.trajectories.at(key).response;
    EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), t.response.begin()));
  }
}

TEST(Engine, TheLengthLimitsHold) {
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/20, /*n=*/2);  // 25 and 36 tokens
  SamplingParams params = make_params(50);
  params.ignore_eos = true;
  for (const auto& [key, t] :
       generate(shared_model(), prompts, params, {.max_model_len = 40}).trajectories) {
    EXPECT_EQ(t.prompt.size() + t.response.size(), 40u);
  }
  params.max_tokens = 1;
  const Result one = generate(shared_model(), prompts, params);
  EXPECT_EQ(one.trajectories.size(), 4u);
  for (const auto& [key, t] : one.trajectories) EXPECT_EQ(t.response.size(), 1u);
}

TEST(Engine, StoppingReturnsWhatThereIs) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/20, /*n=*/2);
  SamplingParams params = make_params(50);
  const Result base = generate(shared_model(), prompts, params);
  int passes = 0;
  const Result part =
      generate(shared_model(), prompts, params, {.max_num_seqs = 3}, [&] { return ++passes > 6; });
  EXPECT_EQ(part.trajectories.size(), 6u);
  int aborted = 0;
  int empty = 0;
  for (const auto& [key, t] : part.trajectories) {
    const auto& whole = base.trajectories.at(key).response;
    ASSERT_LE(t.response.size(), whole.size());
    EXPECT_TRUE(std::equal(t.response.begin(), t.response.end(), whole.begin()));
    aborted += t.finish == FinishReason::kAbort;
    empty += t.response.empty();
  }
  EXPECT_GT(aborted, 0);
  EXPECT_LT(empty, 6);
  const Result none = generate(shared_model(), prompts, params, {}, [] { return true; });
  EXPECT_EQ(none.stats.num_passes, 0);
  EXPECT_EQ(none.trajectories.size(), 6u);
}

TEST(Engine, AnErrorOfTheCallerLeavesTheEngineUsable) {
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/20, /*n=*/2);
  Engine engine(shared_model(), {});
  EXPECT_THROW(
      engine.generate(
          prompts, make_params(50), [](Trajectory&&) { throw std::runtime_error("host"); }),
      std::runtime_error);
  int ended = 0;
  engine.generate(prompts, make_params(50), [&](Trajectory&&) { ++ended; });
  EXPECT_EQ(ended, 4);
}

TEST(Engine, NewWeightsAreSeenByTheNextCall) {
  const auto model = tiny_model();
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/100, /*n=*/2);
  Engine engine(*model, {});
  const auto run = [&] {
    std::map<Key, Trajectory> out;
    engine.generate(prompts, make_params(30), [&](Trajectory&& t) { out[{t.row, t.index}] = t; });
    return out;
  };
  const auto before = run();
  for (Param& param : model->params().params()) param.master.mul_(1.1);
  model->params().repack();
  const auto after = run();
  const Result fresh = generate(*model, prompts, make_params(30));
  for (const auto& [key, t] : after) {
    EXPECT_EQ(t.response, fresh.trajectories.at(key).response);
    EXPECT_EQ(t.rollout_log_probs, fresh.trajectories.at(key).rollout_log_probs);
    EXPECT_NE(t.rollout_log_probs, before.at(key).rollout_log_probs);
  }
}

TEST(Engine, NothingToDo) {
  const Result result = generate(shared_model(), {}, make_params(5));
  EXPECT_EQ(result.stats.num_passes, 0);
}

TEST(Engine, DivergedWeightsAreAnErrorNotAToken) {
  const auto model = tiny_model();
  for (Param& param : model->params().params()) param.master.fill_(std::nanf(""));
  model->params().repack();
  try {
    generate(*model, make_prompts(1, 20, 1), make_params(5));
    ADD_FAILURE() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("[rollout] logits: wanted finite numbers"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace banyan::rollout
