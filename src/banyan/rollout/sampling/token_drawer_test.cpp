// The drawer over a small random head: rows of one batch with different parameters give what each
// gives alone, with the bits of scoring, and a broken row leaves the others be.
#include "banyan/rollout/sampling/token_drawer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include "banyan/ops/edge_logprob.h"
#include "banyan/rollout/sampling/test_support.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kVocab = 5000;  // two segments of the head, the second not full
constexpr int64_t kHidden = 64;

std::unique_ptr<models::CausalLM> make_model(const ComputeOptions& compute = {}) {
  return models::random_model(
      R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 5000,
          "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
          "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.3})",
      /*seed=*/3,
      {.compute = compute, .with_backward = false});
}

models::CausalLM& shared_model() {
  static const std::unique_ptr<models::CausalLM> model = make_model();
  return *model;
}

// The same values at every call.
at::Tensor hidden_rows(int64_t rows, at::ScalarType dtype = at::kBFloat16) {
  std::vector<float> values = random_logits(static_cast<int32_t>(rows * kHidden), 1.0f, 77);
  return at::tensor(values, at::kFloat).view({rows, kHidden}).to(dtype);
}

// One response of every kind, by number.
SamplingParams params_of(int32_t kind) {
  SamplingParams params = free_params();
  switch (kind % 10) {
    case 0:
      break;
    case 1:
      params.temperature = 0.0;
      break;
    case 2:
      params.temperature = 0.7;
      break;
    case 3:
      params.top_p = 0.9;
      break;
    case 4:
      params.top_k = 20;
      params.temperature = 1.3;
      break;
    case 5:
      params.min_p = 0.1;
      params.top_logprobs = 5;
      break;
    case 6:
      params.repetition_penalty = 1.2;
      params.frequency_penalty = 0.4;
      break;
    case 7:
      params.stop_token_ids = {1, 2, 3};
      params.min_tokens = 10;
      break;
    case 8:
      params.allowed_token_ids = {5, 60, 700, 4999};
      params.return_sampling_mask = true;
      break;
    default:
      params.logit_bias = {{17, 5.0f}};
      params.logprob_token_ids = {17, 18};
      params.processed_logprobs = true;
  }
  return params;
}

void expect_equal(const Drawn& got, const Drawn& wanted, int32_t row) {
  EXPECT_EQ(got.status, wanted.status) << "row " << row;
  EXPECT_EQ(got.logprob, wanted.logprob) << "row " << row;
  EXPECT_EQ(got.record.token, wanted.record.token) << "row " << row;
  EXPECT_EQ(got.record.raw, wanted.record.raw) << "row " << row;
  EXPECT_EQ(got.record.processed, wanted.record.processed) << "row " << row;
  EXPECT_EQ(got.record.log_kept_mass, wanted.record.log_kept_mass) << "row " << row;
  EXPECT_EQ(got.record.sampling_mask, wanted.record.sampling_mask) << "row " << row;
  ASSERT_EQ(got.record.top.size(), wanted.record.top.size()) << "row " << row;
  for (size_t i = 0; i < got.record.top.size(); ++i) {
    EXPECT_EQ(got.record.top[i].token, wanted.record.top[i].token);
    EXPECT_EQ(got.record.top[i].logprob, wanted.record.top[i].logprob);
    EXPECT_EQ(got.record.top[i].rank, wanted.record.top[i].rank);
  }
}

struct Batch {
  explicit Batch(const std::vector<SamplingParams>& all) {
    for (size_t r = 0; r < all.size(); ++r) {
      responses.push_back(std::make_unique<Response>(
          all[r], std::vector<int32_t>{1, 2}, std::vector<int32_t>{17, 40, 40}));
      requests.push_back({.row = static_cast<int32_t>(r),
                          .response = &responses.back()->state,
                          .key = {.seed = 4, .row = r},
                          .position = 9});
    }
  }
  std::vector<std::unique_ptr<Response>> responses;
  std::vector<DrawRequest> requests;
};

TEST(TokenDrawer, WhatElseIsInTheBatchChangesNothing) {
  const c10::InferenceMode inference;
  constexpr int32_t kRows = 150;  // more than stand at once
  std::vector<SamplingParams> all;
  for (int32_t r = 0; r < kRows; ++r) all.push_back(params_of(r / 3));
  const Batch batch(all);
  const at::Tensor hidden = hidden_rows(kRows);
  TokenDrawer drawer(shared_model());
  std::vector<Drawn> together;
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  drawer.draw(hidden, batch.requests, together);
  at::set_num_threads(2);
  std::vector<Drawn> again;
  drawer.draw(hidden, batch.requests, again);
  at::set_num_threads(threads);
  for (int32_t r = 0; r < kRows; ++r) expect_equal(again[r], together[r], r);
  for (int32_t r = 0; r < kRows; r += 7) {
    DrawRequest request = batch.requests[r];
    request.row = 0;
    std::vector<Drawn> alone;
    drawer.draw(hidden.narrow(0, r, 1), {request}, alone);
    expect_equal(alone[0], together[r], r);
  }
}

TEST(TokenDrawer, ListsAndMasksDoNotChangeTheToken) {
  const c10::InferenceMode inference;
  for (const double temperature : {1.0, 0.7, 0.0}) {
    SamplingParams plain = free_params();
    plain.temperature = temperature;
    SamplingParams listing = plain;
    listing.top_logprobs = 3;
    const Batch one(std::vector<SamplingParams>(40, plain));
    const Batch other(std::vector<SamplingParams>(40, listing));
    TokenDrawer drawer(shared_model());
    std::vector<Drawn> folded;
    std::vector<Drawn> stored;
    drawer.draw(hidden_rows(40), one.requests, folded);
    drawer.draw(hidden_rows(40), other.requests, stored);
    for (int32_t r = 0; r < 40; ++r) {
      stored[r].record.top.clear();
      expect_equal(folded[r], stored[r], r);
    }
  }
}

TEST(TokenDrawer, LogprobsHaveTheBitsOfScoring) {
  const c10::InferenceMode inference;
  std::vector<SamplingParams> all;
  for (int32_t r = 0; r < 60; ++r) all.push_back(params_of(r % 6));
  const Batch batch(all);
  const at::Tensor hidden = hidden_rows(60);
  TokenDrawer drawer(shared_model());
  std::vector<Drawn> drawn;
  drawer.draw(hidden, batch.requests, drawn);
  for (int32_t r = 0; r < 60; ++r) {
    const auto score = [&](double temperature) {
      const ops::EdgeIndex index{.row_offsets = at::tensor({0, 1}, at::kInt),
                                 .token = at::tensor({drawn[r].record.token}, at::kInt)};
      return ops::edge_logprob_forward(hidden.narrow(0, r, 1),
                                       shared_model().head(),
                                       index,
                                       temperature,
                                       /*with_entropy=*/false,
                                       shared_model().options())
          .logprob.item<float>();
    };
    EXPECT_EQ(drawn[r].logprob, score(all[r].temperature > 0 ? all[r].temperature : 1.0));
    EXPECT_EQ(drawn[r].record.raw, score(1.0));
  }
}

TEST(TokenDrawer, SeveralDrawsFromOneRow) {
  const c10::InferenceMode inference;
  for (const int32_t kind : {0, 2, 3, 9}) {
    const Batch batch(std::vector<SamplingParams>(2, params_of(kind)));
    std::vector<DrawRequest> requests;
    for (int32_t i = 0; i < 20; ++i) {
      requests.push_back(batch.requests[i < 12 ? 0 : 1]);
      requests.back().key.index = static_cast<uint64_t>(i);
    }
    TokenDrawer drawer(shared_model());
    std::vector<Drawn> drawn;
    drawer.draw(hidden_rows(2), requests, drawn);
    for (const int32_t i : {0, 5, 11, 12, 19}) {
      std::vector<Drawn> alone;
      DrawRequest request = requests[i];
      request.row = 0;
      drawer.draw(hidden_rows(2).narrow(0, i < 12 ? 0 : 1, 1), {request}, alone);
      expect_equal(drawn[i], alone[0], i);
    }
  }
}

TEST(TokenDrawer, ABrokenRowLeavesTheOthersBe) {
  const c10::InferenceMode inference;
  std::vector<SamplingParams> all;
  for (int32_t r = 0; r < 20; ++r) all.push_back(params_of(r));
  all[13].bad_words = {{5}, {60}, {700}, {4999}};
  all[13].allowed_token_ids = {5, 60, 700, 4999};
  const Batch batch(all);
  TokenDrawer drawer(shared_model());
  std::vector<Drawn> wanted;
  drawer.draw(hidden_rows(20), batch.requests, wanted);
  at::Tensor hidden = hidden_rows(20);
  for (const int64_t row : {0, 3, 12}) hidden[row].fill_(std::nanf(""));
  std::vector<Drawn> drawn;
  drawer.draw(hidden, batch.requests, drawn);
  for (int32_t r = 0; r < 20; ++r) {
    if (r == 0 || r == 3 || r == 12) {
      EXPECT_EQ(drawn[r].status, DrawStatus::kNotFinite);
    } else if (r == 13) {
      EXPECT_EQ(drawn[r].status, DrawStatus::kNothingLeft);
    } else {
      expect_equal(drawn[r], wanted[r], r);
    }
  }
}

TEST(TokenDrawer, ScoresPrompts) {
  const c10::InferenceMode inference;
  const at::Tensor hidden = hidden_rows(140);
  std::vector<int32_t> next(140);
  for (int32_t r = 0; r < 140; ++r) next[r] = r * 31 % kVocab;
  TokenDrawer drawer(shared_model());
  std::vector<std::vector<TokenLogprob>> scored;
  drawer.score(hidden, next, /*num_top=*/3, /*ids=*/{7}, scored);
  const at::Tensor logits =
      ops::head_logits(hidden, shared_model().head(), shared_model().options());
  const at::Tensor wanted =
      ops::logits_logprob(logits, at::tensor(next, at::kInt), 1.0, shared_model().options());
  for (int32_t r = 0; r < 140; ++r) {
    ASSERT_EQ(scored[r].size(), 5u);
    EXPECT_EQ(scored[r][0].token, next[r]);
    EXPECT_EQ(scored[r][0].logprob, wanted[r].item<float>());
    EXPECT_EQ(scored[r][1].rank, 1);
    EXPECT_EQ(scored[r][1].token, logits[r].argmax().item<int64_t>());
    EXPECT_GE(scored[r][2].logprob, scored[r][3].logprob);
    EXPECT_EQ(scored[r][4].token, 7);
  }
}

TEST(TokenDrawer, PlainOperatorsDrawTheSameLaw) {
  const c10::InferenceMode inference;
  const auto model = make_model({.dtype = at::kFloat, .kernels = Kernels::kAten});
  std::vector<SamplingParams> all;
  for (int32_t r = 0; r < 30; ++r) all.push_back(params_of(r));
  const Batch batch(all);
  const at::Tensor hidden = hidden_rows(30, at::kFloat);
  TokenDrawer drawer(*model);
  std::vector<Drawn> drawn;
  drawer.draw(hidden, batch.requests, drawn);
  const at::Tensor logits = ops::head_logits(hidden, model->head(), model->options());
  for (int32_t r = 0; r < 30; ++r) {
    const at::Tensor row = logits[r].to(at::kDouble);
    const double raw =
        row[drawn[r].record.token].item<double>() - row.logsumexp({0}).item<double>();
    EXPECT_NEAR(drawn[r].record.raw, raw, 1e-5);
  }
}

// Whatever the parameters, each drawn id comes with finite raw and processed log-probabilities.
TEST(TokenDrawer, EveryTokenHasItsLogprob) {
  const c10::InferenceMode inference;
  std::vector<SamplingParams> all;
  for (int32_t r = 0; r < 60; ++r) all.push_back(params_of(r));
  const Batch batch(all);
  TokenDrawer drawer(shared_model());
  std::vector<Drawn> drawn;
  drawer.draw(hidden_rows(60), batch.requests, drawn);
  ASSERT_EQ(drawn.size(), batch.requests.size());
  for (const Drawn& one : drawn) {
    EXPECT_EQ(one.status, DrawStatus::kDrawn);
    EXPECT_TRUE(std::isfinite(one.logprob) && one.logprob <= 0.0f);
    EXPECT_TRUE(std::isfinite(one.record.raw) && one.record.raw <= 0.0f);
    EXPECT_TRUE(std::isfinite(one.record.processed) && one.record.processed <= 1e-6f);
  }
}

}  // namespace
}  // namespace banyan::rollout
