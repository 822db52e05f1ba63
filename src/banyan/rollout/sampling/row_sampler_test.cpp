// One row of logits: every operator by hand, the order of operators, what cannot be drawn from.
// Lists and laws are in row_laws_test.cpp.
#include "banyan/rollout/sampling/row_sampler.h"

#include <memory>

#include "banyan/rollout/sampling/test_support.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

// The law that is drawn from, by listing the whole vocabulary.
std::vector<double> processed_law(const std::vector<float>& z, SamplingParams params) {
  params.top_logprobs = kAllTokens;
  params.processed_logprobs = true;
  const Drawn drawn = draw_one(z, params, 0.5f);
  std::vector<double> p(z.size(), 0.0);
  for (size_t i = 1; i < drawn.record.top.size(); ++i) {
    p[drawn.record.top[i].token] = std::exp(drawn.record.top[i].logprob);
  }
  return p;
}

void expect_law(const std::vector<double>& got, const std::vector<double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-6) << "token " << i;
}

TEST(RowSampler, OperatorsByHand) {
  expect_law(processed_law(kFour, free_params()), {0.1, 0.4, 0.2, 0.3});
  expect_law(processed_law(kFour, with([](auto& p) { p.temperature = 0.5; })),
             {1 / 30., 16 / 30., 4 / 30., 9 / 30.});
  expect_law(processed_law(kFour, with([](auto& p) { p.top_k = 2; })), {0, 4 / 7., 0, 3 / 7.});
  expect_law(processed_law(kFour, with([](auto& p) { p.top_p = 0.65; })), {0, 4 / 7., 0, 3 / 7.});
  expect_law(processed_law(kFour, with([](auto& p) { p.top_p = 0.75; })),
             {0, 4 / 9., 2 / 9., 3 / 9.});
  expect_law(processed_law(kFour, with([](auto& p) { p.min_p = 0.3; })),
             {0, 4 / 9., 2 / 9., 3 / 9.});
  expect_law(processed_law(kFour, with([](auto& p) { p.min_p = 1.0; })), {0, 1, 0, 0});
  expect_law(processed_law(kFour, with([](auto& p) { p.allowed_token_ids = {3, 0, 3}; })),
             {0.25, 0, 0, 0.75});
  expect_law(processed_law(kFour, with([](auto& p) { p.logit_bias = {{0, std::log(4.0f)}}; })),
             {4 / 13., 4 / 13., 2 / 13., 3 / 13.});
  expect_law(processed_law(kFour, with([](auto& p) { p.logit_bias = {{0, 1e30f}}; })),
             {1, 0, 0, 0});  // clamped to 100
  expect_law(processed_law(kFour, with([](auto& p) {
                             p.eos_ids = {1};
                             p.stop_token_ids = {3};
                             p.min_tokens = 1;
                           })),
             {1 / 3., 0, 2 / 3., 0});
}

TEST(RowSampler, EachTruncationSeesWhatTheOneBeforeLeft) {
  // top_k = 3 leaves {4, 2, 3} / 9; 0.7 of that needs 4 + 3 alone, 0.7 of the whole does too, but
  // 0.78 of the whole would need all three.
  expect_law(processed_law(kFour, with([](auto& p) {
                             p.top_k = 3;
                             p.top_p = 0.77;
                           })),
             {0, 4 / 7., 0, 3 / 7.});
  // min_p = 0.6 leaves {4, 3} / 7; 0.5 of that is the first alone.
  expect_law(processed_law(kFour, with([](auto& p) {
                             p.min_p = 0.6;
                             p.top_p = 0.5;
                           })),
             {0, 1, 0, 0});
  // min_p looks at p after the temperature: at T = 2, sqrt(0.1 / 0.4) = 0.5 of the largest.
  expect_law(processed_law(kFour, with([](auto& p) {
                             p.temperature = 2.0;
                             p.min_p = 0.49;
                             p.top_k = 4;
                           })),
             [] {
               std::vector<double> p = {
                   std::sqrt(0.1), std::sqrt(0.4), std::sqrt(0.2), std::sqrt(0.3)};
               const double sum = p[0] + p[1] + p[2] + p[3];
               for (double& value : p) value /= sum;
               return p;
             }());
}

TEST(RowSampler, PenaltiesByHand) {
  const std::vector<float> z = {1.0f, -1.0f, 2.0f, 0.5f, -0.5f};
  SamplingParams params = free_params();
  params.repetition_penalty = 2.0;
  params.frequency_penalty = 0.25;
  params.presence_penalty = 0.5;
  params.logit_bias = {{4, 1.5f}};
  // Prompt {0, 1}, response {2, 2, 4, 0}.
  //   0: 1 / 2 - 0.25 - 0.5 = -0.25    1: -1 * 2 = -2    2: 2 / 2 - 0.5 - 0.5 = 0
  //   3: 0.5    4: (-0.5 + 1.5) / 2 - 0.25 - 0.5 = -0.25: the bias comes before the penalties
  const Response response(params, {0, 1}, {2, 2, 4, 0});
  std::vector<double> wanted = {
      std::exp(-0.25), std::exp(-2.0), 1.0, std::exp(0.5), std::exp(-0.25)};
  const double sum = std::accumulate(wanted.begin(), wanted.end(), 0.0);
  for (float u = 0.02f; u < 1.0f; u += 0.1f) {
    const Drawn drawn = draw_one(z, response.state, u);
    EXPECT_NEAR(drawn.record.processed, std::log(wanted[drawn.record.token] / sum), 1e-6);
    EXPECT_EQ(drawn.logprob, drawn.record.processed);
  }
  params.temperature = 0.0;
  const Response greedy(params, {0, 1}, {2, 2, 4, 0});
  EXPECT_EQ(draw_one(z, greedy.state, 0.0f).record.token, 3);
}

TEST(RowSampler, BadWordsBarTheirLastToken) {
  SamplingParams params = free_params();
  params.bad_words = {{3}, {1, 2}, {0, 1, 0}};
  params.return_sampling_mask = true;
  const auto barred = [&](const std::vector<int32_t>& tokens) {
    const Response response(params, {1}, tokens);  // a prompt is no response
    std::vector<int32_t> out;
    const Drawn drawn = draw_one(kFour, response.state, 0.0f);
    for (int32_t id = 0; id < 4; ++id) {
      const auto& mask = drawn.record.sampling_mask;
      if (std::find(mask.begin(), mask.end(), id) == mask.end()) out.push_back(id);
    }
    return out;
  };
  EXPECT_EQ(barred({}), (std::vector<int32_t>{3}));
  EXPECT_EQ(barred({1}), (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(barred({0, 1}), (std::vector<int32_t>{0, 2, 3}));
  EXPECT_EQ(barred({1, 0}), (std::vector<int32_t>{3}));
}

TEST(RowSampler, GreedyIgnoresTruncationAndTakesTheLowestIdOfTheLargest) {
  std::vector<float> z = random_logits(500, 1.0f, 3);
  z[123] = z[321] = 9.0f;
  for (const double temperature : {0.0, 9e-6}) {
    const Drawn drawn = draw_one(z,
                                 with([&](auto& p) {
                                   p.temperature = temperature;
                                   p.top_k = 3;
                                   p.top_p = 0.1;
                                   p.min_p = 0.5;
                                   p.return_sampling_mask = true;
                                 }),
                                 0.99f);
    EXPECT_EQ(drawn.record.token, 123);
    EXPECT_EQ(drawn.record.log_kept_mass, 0.0f);
    EXPECT_EQ(drawn.record.processed, drawn.record.raw);  // at T = 1
    EXPECT_TRUE(drawn.record.sampling_mask.empty());
  }
  for (const auto& params :
       {with([](auto& p) { p.top_k = 1; }), with([](auto& p) { p.top_p = 1e-9; })}) {
    for (const float u : {0.0f, 0.3f, 0.99999994f}) {
      const Drawn drawn = draw_one(z, params, u);
      EXPECT_EQ(drawn.record.token, 123);
      EXPECT_NEAR(drawn.record.processed, 0.0f, 1e-6);
      EXPECT_NEAR(drawn.record.log_kept_mass, drawn.record.raw, 1e-6);
    }
  }
  // Equal to the largest: min_p keeps both.
  EXPECT_EQ(draw_one(z, with([](auto& p) { p.min_p = 1.0; }), 0.7f).record.token, 321);
}

TEST(RowSampler, TiesAtTheKth) {
  const std::vector<float> z = {1.0f, 2.0f, 1.0f, 3.0f, 1.0f};
  const auto mask = [&](bool ties, int32_t k, double top_p) {
    return draw_one(z,
                    with([&](auto& p) {
                      p.top_k = k;
                      p.top_k_ties = ties;
                      p.top_p = top_p;
                      p.return_sampling_mask = true;
                    }),
                    0.5f)
        .record.sampling_mask;
  };
  EXPECT_EQ(mask(false, 3, 1.0), (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(mask(true, 3, 1.0), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(mask(true, 2, 1.0), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(mask(true, 3, 0.8), (std::vector<int32_t>{0, 1, 3}));  // top_p breaks ties by id
}

TEST(RowSampler, InvertsTheCumulativeDistributionInIdOrder) {
  const std::vector<float> z = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  for (const auto& params : {free_params(), with([](auto& p) { p.min_p = 1e-6; })}) {
    const auto token = [&](float u) { return draw_one(z, params, u).record.token; };
    EXPECT_EQ(token(0.0f), 0);
    EXPECT_EQ(token(0.199f), 0);
    EXPECT_EQ(token(0.201f), 1);
    EXPECT_EQ(token(0.699f), 1);
    EXPECT_EQ(token(0.701f), 2);
    EXPECT_EQ(token(0.99999994f), 2);
  }
}

TEST(RowSampler, NeverDrawsWhatHasNoMass) {
  std::vector<float> z(1000, -kInf);
  z[400] = z[700] = 1.0f;
  for (const auto& params : {free_params(),
                             with([](auto& p) { p.top_p = 0.999; }),
                             with([](auto& p) { p.top_k = 900; })}) {
    EXPECT_EQ(draw_one(z, params, 0.0f).record.token, 400);
    EXPECT_EQ(draw_one(z, params, 0.49f).record.token, 400);
    EXPECT_EQ(draw_one(z, params, 0.51f).record.token, 700);
    EXPECT_EQ(draw_one(z, params, 0.99999994f).record.token, 700);
  }
}

TEST(RowSampler, SaysWhyARowCannotBeDrawn) {
  const float nan = std::nanf("");
  const std::vector<SamplingParams> cases = {
      free_params(),
      with([](auto& p) { p.temperature = 0.0; }),
      with([](auto& p) { p.temperature = 0.7; }),
      with([](auto& p) { p.top_p = 0.5; }),
      with([](auto& p) { p.top_k = 3; }),
      with([](auto& p) { p.logit_bias = {{5, 1.0f}}; }),
  };
  for (const SamplingParams& params : cases) {
    for (const int32_t place : {0, 17, 299}) {
      std::vector<float> z = random_logits(300, 1.0f, 5);
      EXPECT_EQ(draw_one(z, params, 0.5f).status, DrawStatus::kDrawn);
      const Response response(params, {0}, {});
      for (const float broken : {nan, kInf}) {
        z[place] = broken;
        RowSampler sampler(300);
        sampler.load(z.data());
        Drawn drawn;
        sampler.draw(response.state, 0.5f, /*with_raw=*/false, drawn);
        EXPECT_EQ(drawn.status, DrawStatus::kNotFinite);
      }
    }
    EXPECT_EQ(draw_one(std::vector<float>(300, -kInf), params, 0.5f).status,
              DrawStatus::kNotFinite);
  }
  const auto everything_barred = with([](auto& p) {
    p.allowed_token_ids = {1};
    p.bad_words = {{1}};
  });
  EXPECT_EQ(draw_one(kFour, everything_barred, 0.5f).status, DrawStatus::kNothingLeft);
}

TEST(RowSampler, ExtremeParametersStayFinite) {
  const std::vector<float> z = random_logits(1000, 3.0f, 8);
  for (const auto& params : {with([](auto& p) { p.repetition_penalty = 1e-30; }),
                             with([](auto& p) { p.repetition_penalty = 1e30; }),
                             with([](auto& p) { p.temperature = 1e-4; }),
                             with([](auto& p) { p.temperature = 1e9; })}) {
    const Response response(params, {1, 2, 3}, {4, 5});
    const Drawn drawn = draw_one(z, response.state, 0.5f);
    EXPECT_EQ(drawn.status, DrawStatus::kDrawn);
    EXPECT_TRUE(std::isfinite(drawn.record.processed));
  }
}

TEST(RowSampler, AGrammarAllowsItsTransitionsAndEosWhereItMayEnd) {
  // State 0 -1-> 1, -2-> 0; state 1 is final and leads nowhere.
  const auto table = std::make_shared<const TokenTable>(std::vector<int64_t>{0, 2, 2},
                                                        std::vector<int32_t>{1, 2},
                                                        std::vector<int32_t>{1, 0},
                                                        std::vector<uint8_t>{0, 1});
  SamplingParams params = free_params();
  params.grammar = table;
  params.eos_ids = {3};
  params.ignore_eos = true;
  params.min_tokens = 5;  // gives way where only EOS is left
  expect_law(processed_law(kFour, params), {0, 2 / 3., 1 / 3., 0});
  const Response ended(params, {0}, {2, 1});
  const Drawn last = draw_one(kFour, ended.state, 0.1f);
  EXPECT_EQ(last.record.token, 3);
  EXPECT_NEAR(last.record.processed, 0.0f, 1e-6);
  EXPECT_NEAR(last.record.raw, std::log(0.3f), 1e-6);  // of the row before the mask
  params.allowed_token_ids = {0, 2};
  expect_law(processed_law(kFour, params), {0, 0, 1, 0});
}

TEST(RowSampler, AFinalStateBelowMinTokensGoesOnWhereItCan) {
  // State 0 is final and leads to itself by 1 and 2.
  SamplingParams params = free_params();
  params.grammar = std::make_shared<const TokenTable>(std::vector<int64_t>{0, 2},
                                                      std::vector<int32_t>{1, 2},
                                                      std::vector<int32_t>{0, 0},
                                                      std::vector<uint8_t>{1});
  params.eos_ids = {3};
  params.min_tokens = 2;
  for (const bool ignore_eos : {false, true}) {
    params.ignore_eos = ignore_eos;
    expect_law(processed_law(kFour, params), {0, 2 / 3., 1 / 3., 0});
    const Response enough(params, {0}, {1, 1});
    EXPECT_EQ(draw_one(kFour, enough.state, 0.999f).record.token, 3);
  }
}

}  // namespace
}  // namespace banyan::rollout
