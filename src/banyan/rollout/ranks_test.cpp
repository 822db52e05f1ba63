// One rollout model over several ranks, which are threads here: whatever the engine does, they all
// give the tokens and log-probabilities of one process.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/parallel/cut_head.h"
#include "banyan/rollout/test_support.h"
#include "banyan/testing/thread_transport.h"

namespace banyan::rollout {
namespace {

using parallel::Groups;

constexpr int64_t kLayers = 2;
constexpr int64_t kHidden = 64;

// A head more or less changes who holds what.
std::string model_config(int64_t heads, int64_t kv_heads) {
  return banyan::detail::concat(
      R"({"model_type": "qwen3", "vocab_size": 301, "hidden_size": 64, "intermediate_size": 97,
          "num_hidden_layers": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "max_position_embeddings": 1024, "tie_word_embeddings": true, "hidden_act": "silu",
          "initializer_range": 0.15, "num_attention_heads": )",
      heads,
      R"(, "num_key_value_heads": )",
      kv_heads,
      "}");
}

std::unique_ptr<models::CausalLM> load(const std::string& config,
                                       at::ScalarType dtype,
                                       Groups* groups) {
  models::LoadOptions options{.compute = {.dtype = dtype}, .with_backward = false};
  if (groups != nullptr) options.tensor = &groups->rollout_tensor;
  return models::random_model(config, /*seed=*/3, options);
}

// What `body` gives on each of `size` ranks that hold one model together.
template <typename Body>
auto over(int64_t size, const Body& body) {
  std::vector<decltype(body(std::declval<Groups&>()))> results(size);
  testing::run_mesh(size, {.rollout_tp = size}, [&](Groups& groups) {
    results[groups.rollout_tensor.rank()] = body(groups);
  });
  return results;
}

struct Bound {
  at::ScalarType dtype;
  double logprob;
};
constexpr Bound kBounds[] = {{at::kDouble, 1e-10}, {at::kFloat, 1e-5}};

void expect_near(const Result& got, const Result& wanted, double bound, const std::string& what) {
  ASSERT_EQ(got.trajectories.size(), wanted.trajectories.size()) << what;
  for (const auto& [key, trajectory] : wanted.trajectories) {
    const Trajectory& other = got.trajectories.at(key);
    ASSERT_EQ(other.response, trajectory.response) << what;
    EXPECT_EQ(other.finish, trajectory.finish) << what;
    for (size_t i = 0; i < trajectory.response.size(); ++i) {
      EXPECT_NEAR(other.rollout_log_probs[i], trajectory.rollout_log_probs[i], bound) << what;
    }
  }
  EXPECT_EQ(got.stats.num_passes, wanted.stats.num_passes) << what;
  EXPECT_EQ(got.stats.num_preemptions, wanted.stats.num_preemptions) << what;
  EXPECT_EQ(got.stats.computed_prompt_tokens, wanted.stats.computed_prompt_tokens) << what;
}

// Long enough for a small pool to run out of pages.
SamplingParams long_params(int32_t max_tokens) {
  SamplingParams params = make_params(max_tokens);
  params.eos_ids = {7};
  return params;
}

struct Shape {
  int64_t size;
  int64_t heads;
  int64_t kv_heads;
};
// Even, uneven, and fewer kv heads than ranks.
constexpr Shape kShapes[] = {{2, 4, 2}, {3, 8, 4}, {4, 4, 2}};

}  // namespace

TEST(RolloutRanks, AGenerationIsThatOfOneProcess) {
  const std::vector<Prompt> prompts = make_prompts(3, /*trunk=*/70, /*n=*/3);
  SamplingParams sampled = make_params(12);
  SamplingParams greedy = make_params(12);
  greedy.temperature = 0.0;
  SamplingParams changed = make_params(12);
  changed.temperature = 0.7;
  changed.top_k = 20;
  changed.top_p = 0.9;
  changed.repetition_penalty = 1.2;
  for (const Shape& shape : kShapes) {
    const std::string config = model_config(shape.heads, shape.kv_heads);
    for (const Bound& bound : kBounds) {
      const auto one = load(config, bound.dtype, nullptr);
      for (const SamplingParams& params : {greedy, sampled, changed}) {
        const Result wanted = generate(*one, prompts, params);
        const std::vector<Result> got = over(shape.size, [&](Groups& groups) {
          return generate(*load(config, bound.dtype, &groups), prompts, params);
        });
        for (const Result& rank : got) {
          expect_near(rank, wanted, bound.logprob, std::to_string(shape.size) + " ranks");
          expect_same(rank, got[0], "ranks differ");
        }
      }
    }
  }
}

TEST(RolloutRanks, WhateverTheScheduleDoesOneDoesAll) {
  const std::vector<Prompt> prompts = make_prompts(3, /*trunk=*/40, /*n=*/4);
  const std::string config = model_config(8, 4);
  const auto one = load(config, at::kFloat, nullptr);
  EngineOptions chunked;
  chunked.max_num_batched_tokens = 64;
  EngineOptions alone;
  alone.share_prefix = false;
  const auto pages_of = [&](int64_t pages, int64_t kv_heads) {
    return pages * ops::KvPool::page_bytes(kLayers, kv_heads, 16, one->options());
  };
  for (const bool is_tight : {true, false}) {  // then responses must give way
    EngineOptions options = is_tight ? chunked : alone;
    const int64_t pages = is_tight ? 7 : 100;
    const SamplingParams params = is_tight ? long_params(180) : make_params(40);
    options.kv_bytes = pages_of(pages, 4);
    const Result wanted = generate(*one, prompts, params, options);
    EXPECT_EQ(wanted.stats.num_preemptions > 0, is_tight);
    const auto got = over(3, [&](Groups& groups) {
      const auto model = load(config, at::kFloat, &groups);
      EngineOptions own = options;  // the same pages: of two heads on rank 0, of one elsewhere
      own.kv_bytes = pages_of(pages, model->tensor()->kv_heads().count);
      return generate(*model, prompts, params, own);
    });
    for (const Result& rank : got) expect_near(rank, wanted, 1e-5, "three ranks");
  }
}

// Ranks whose machines differ: the one with least room decides for all.
TEST(RolloutRanks, TheLeastRoomDecides) {
  const std::vector<Prompt> prompts = make_prompts(3, /*trunk=*/40, /*n=*/4);
  const SamplingParams params = long_params(110);
  const std::string config = model_config(4, 2);
  const auto one = load(config, at::kFloat, nullptr);
  const int64_t page = ops::KvPool::page_bytes(kLayers, 1, 16, one->options());
  EngineOptions options;
  options.kv_bytes = 7 * 2 * page;
  const Result wanted = generate(*one, prompts, params, options);
  EXPECT_GT(wanted.stats.num_preemptions, 0);
  const auto got = over(2, [&](Groups& groups) {
    EngineOptions own;
    own.kv_bytes = (groups.rollout_tensor.is_first() ? 40 : 7) * page;
    return generate(*load(config, at::kFloat, &groups), prompts, params, own);
  });
  for (const Result& rank : got) expect_near(rank, wanted, 1e-5, "two ranks");
}

// Pages in host memory: what a spill costs is measured, and the first rank's measure decides. The
// first pool has nothing to compare copies with; a pool that measured slow copies is tried again.
TEST(RolloutRanks, SpillsAreThoseOfTheFirst) {
  constexpr int64_t kMostPools = 20;
  const std::vector<Prompt> prompts = make_prompts(3, /*trunk=*/40, /*n=*/4);
  const SamplingParams params = long_params(110);
  const std::string config = model_config(4, 2);
  const auto one = load(config, at::kFloat, nullptr);
  const int64_t page = ops::KvPool::page_bytes(kLayers, 1, 16, one->options());
  const Result wanted = generate(*one, prompts, params);
  struct Spills {
    Result last;
    int64_t num_pages = 0;
    int64_t num_passes = 0;
  };
  const auto got = over(2, [&](Groups& groups) {
    const auto model = load(config, at::kFloat, &groups);
    EngineOptions own;
    own.kv_bytes = 9 * page;
    own.host_kv_bytes = (groups.rollout_tensor.is_first() ? 30 : 20) * page;
    Engine engine(*model, own);
    generate(engine, prompts, make_params(4));
    EXPECT_EQ(engine.stats().counters.at("spilled_pages"), 0);
    Spills spills;
    for (int64_t pool = 0; pool < kMostPools && spills.num_pages == 0; ++pool) {
      spills.last = generate(engine, prompts, params);
      spills.num_pages = engine.stats().counters.at("spilled_pages");
    }
    spills.num_passes = engine.stats().counters.at("passes");
    return spills;
  });
  for (const Spills& rank : got) {
    for (const auto& [key, trajectory] : wanted.trajectories) {
      EXPECT_EQ(rank.last.trajectories.at(key).response, trajectory.response);
    }
    EXPECT_GT(rank.num_pages, 0);
    EXPECT_EQ(rank.num_pages, got[0].num_pages);
    EXPECT_EQ(rank.num_passes, got[0].num_passes);
  }
}

TEST(RolloutRanks, AbortSleepAndNewWeights) {
  const std::vector<Prompt> prompts = make_prompts(3, /*trunk=*/70, /*n=*/3);
  const SamplingParams params = make_params(20);
  const std::string config = model_config(4, 2);
  // Some of a generation, all of it after a sleep, and once more under other weights: a pool that
  // stays, with what it has cached.
  const auto life = [&](Groups* groups) {
    const auto model = load(config, at::kFloat, groups);
    EngineOptions options;
    options.kv_bytes = 200 * ops::KvPool::page_bytes(kLayers, 2, 16, model->options());
    options.keep_pool = true;
    Engine engine(*model, options);
    std::vector<Result> results;
    const auto run = [&](int64_t most_calls) {
      int64_t calls = 0;
      results.push_back(generate(
          engine, prompts, params, [&] { return most_calls > 0 && ++calls > most_calls; }));
    };
    run(/*most_calls=*/9);
    run(0);
    engine.sleep(1, PauseMode::kRetract, /*timeout=*/10.0);
    engine.wake({});
    run(0);
    for (Param& param : model->params().params()) param.master.mul_(1.01);
    model->params().repack();
    engine.weights_changed(1);
    run(0);
    return results;
  };
  const std::vector<Result> wanted = life(nullptr);
  EXPECT_TRUE(std::any_of(wanted[0].trajectories.begin(),
                          wanted[0].trajectories.end(),
                          [](const auto& t) { return t.second.finish == FinishReason::kAbort; }));
  EXPECT_LT(wanted[1].stats.computed_prompt_tokens, wanted[3].stats.computed_prompt_tokens);
  for (const auto& rank : over(2, [&](Groups& groups) { return life(&groups); })) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      expect_near(rank[i], wanted[i], 1e-5, "run " + std::to_string(i));
    }
  }
}

// In bf16 products are added at other places than in one process, and twice at the same ones: the
// log-probabilities are those that the same ranks score, up to the rounding of a sum in fp32.
TEST(RolloutRanks, ScoringByTheSameRanksAgrees) {
  const std::vector<Prompt> prompts = make_prompts(3, /*trunk=*/70, /*n=*/3);
  const SamplingParams params = make_params(12);
  const std::string config = model_config(8, 4);
  const auto run = [&](Groups& groups) {
    const auto model = load(config, at::kBFloat16, &groups);
    const Result result = generate(*model, prompts, params);
    const std::vector<Sample> samples = samples_of(result);
    const trie::Trie trie = trie::build(samples);
    trie::LogicalTokens logical;
    const trie::Edges edges = trie::edges_of(trie, samples, &logical);
    ops::TrieAttention attention(trie, model->options());
    const at::Tensor hidden = model->forward(ints(trie.tok), ints(trie.pos), attention, nullptr);
    const ops::EdgeLogprob scored = parallel::edge_logprob_forward(
        *model->tensor(),
        hidden.index_select(0, ints(edges.source)),
        model->head(),
        parallel::own_edges(*model->tensor(), {ints(edges.row_offsets), ints(edges.token)}),
        /*temperature=*/1.0,
        /*with_entropy=*/false,
        model->options());
    size_t s = 0;
    for (const auto& [key, t] : result.trajectories) {
      for (size_t i = 0; i < t.response.size(); ++i) {
        const int32_t edge = logical.edge[logical.offsets[s] + static_cast<int32_t>(i)];
        EXPECT_NEAR(
            t.rollout_log_probs[i], scored.logprob.to(at::kFloat)[edge].item<float>(), 2e-6);
      }
      ++s;
    }
    return result;
  };
  const std::vector<Result> first = over(3, run);
  const std::vector<Result> second = over(3, run);
  for (const Result& rank : first) expect_same(rank, first[0], "ranks differ");
  expect_same(second[0], first[0], "two runs differ");
}

// A pass of T tokens of which R are drawn from; S(N) = (n - 1) ceil(N / n) b.
TEST(RolloutRanks, TheBytesOfAPassAreThoseOfTheFormula) {
  for (const int64_t n : {2, 3}) {
    over(n, [&](Groups& groups) {
      const auto model = load(model_config(8, 4), at::kFloat, &groups);
      EngineOptions options;
      options.kv_bytes = 100 * ops::KvPool::page_bytes(kLayers, 4, 16, model->options());
      SamplingParams params = make_params(6);
      params.ignore_eos = true;
      const std::vector<Prompt> prompts = make_prompts(1, /*trunk=*/40, /*n=*/2);
      const auto length = static_cast<int64_t>(prompts[0].tokens.size());
      generate(*model, prompts, params, options);
      const auto sent = [&](int64_t numbers) { return (n - 1) * ((numbers + n - 1) / n) * 4; };
      int64_t sums = 0;
      int64_t logits = 0;
      // The prompt, whose last row both responses draw from, then both of them five times.
      for (const int64_t tokens :
           {length, int64_t{2}, int64_t{2}, int64_t{2}, int64_t{2}, int64_t{2}}) {
        sums += (2 * kLayers + 1) * sent(tokens * kHidden);
        logits += (n - 1) * (tokens == length ? 1 : 2) * ((301 + n - 1) / n) * 4;
      }
      const auto& traffic = groups.rollout_tensor.traffic();
      EXPECT_EQ(traffic.at("all_to_all").bytes, sums);
      // And the pages and places that the ranks agree on, once a pool.
      EXPECT_EQ(traffic.at("all_gather").bytes, sums + logits + 2 * (n - 1) * 8);
      EXPECT_EQ(groups.tensor.traffic().size(), 0u);
      return 0;
    });
  }
}

// Each generates what is its own (with two ranks that hold the rest of a layer together: what is
// theirs) and takes part in the passes of the others: one rank has no prompt at all, and one stops
// early. Per pass of all a rank tells the others that it is there, and how many rows go to each
// expert of a layer.
TEST(RolloutRanks, ThoseThatShareExpertsGoThroughEveryPassTogether) {
  const std::string config =
      R"({"model_type": "qwen3_moe", "vocab_size": 301, "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
          "initializer_range": 0.15, "num_experts": 12, "num_experts_per_tok": 2,
          "moe_intermediate_size": 24, "norm_topk_prob": true, "mlp_only_layers": [0]})";
  constexpr int64_t kExperts = 12;
  constexpr int64_t kExpertLayers = 2;
  const std::vector<Prompt> prompts = make_prompts(2, /*trunk=*/70, /*n=*/3);
  const SamplingParams params = make_params(20);
  for (const Bound& bound : {kBounds[0], kBounds[1], Bound{at::kBFloat16, 0.0}}) {
    const auto one = load(config, bound.dtype, nullptr);
    for (const int64_t n : {2, 3, 4}) {
      const int64_t tensor = n == 4 ? 2 : 1;
      std::vector<Result> results(n);
      testing::run_mesh(n, {.rollout_tp = tensor, .rollout_ep = n}, [&](Groups& groups) {
        models::LoadOptions options{.compute = {.dtype = bound.dtype}, .with_backward = false};
        options.experts = &groups.rollout_experts;
        if (tensor > 1) {
          options.tensor = &groups.rollout_tensor;
          options.expert_tensor = &groups.self;
          options.expert_model = &groups.rollout_experts;
        }
        const auto model = models::random_model(config, /*seed=*/3, options);
        const int64_t rank = groups.rollout_experts.rank();
        std::vector<Prompt> own;
        if (rank / tensor < 2) own.push_back(prompts[rank / tensor]);
        int64_t calls = 0;
        results[rank] =
            generate(*model, own, params, {}, [&] { return rank == 1 && n == 3 && ++calls > 5; });
        const std::vector<double> all = groups.rollout_experts.all_gather_number(
            static_cast<double>(results[rank].stats.num_passes));
        const auto passes = static_cast<int64_t>(*std::max_element(all.begin(), all.end()));
        const int64_t told = kExpertLayers * passes * 8 * kExperts + (passes + 1) * 8 + 8;
        EXPECT_EQ(groups.rollout_experts.traffic().at("all_gather").bytes, (n - 1) * told);
      });
      for (int64_t rank = 0; rank < 2 * tensor; ++rank) {
        const Result wanted = generate(*one, {prompts[rank / tensor]}, params);
        if (bound.dtype == at::kBFloat16 && tensor > 1) {  // sums at other places
          expect_same(results[rank], results[rank / tensor * tensor], "ranks differ");
          continue;
        }
        if (rank == 0 || n != 3) {
          expect_near(results[rank], wanted, bound.logprob, "rank " + std::to_string(rank));
          continue;
        }
        for (const auto& [key, cut] : results[rank].trajectories) {
          const std::vector<int32_t>& whole = wanted.trajectories.at(key).response;
          ASSERT_LE(cut.response.size(), whole.size());
          EXPECT_TRUE(std::equal(cut.response.begin(), cut.response.end(), whole.begin()));
        }
      }
    }
  }
}

TEST(RolloutRanks, AServerWantsAWholeModel) {
  over(2, [&](Groups& groups) {
    const auto model = load(model_config(4, 2), at::kFloat, &groups);
    Engine engine(*model, {});
    try {
      engine.start();
      ADD_FAILURE() << "started";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("[rollout] start: wanted a whole model"),
                std::string::npos);
    }
    return 0;
  });
}

}  // namespace banyan::rollout
