// One row of logits: lists of log-probabilities with their ranks, the mass that is kept, and draws
// against the exact law.
#include "banyan/core/rng.h"
#include "banyan/rollout/sampling/row_sampler.h"
#include "banyan/rollout/sampling/test_support.h"

namespace banyan::rollout {
namespace {

TEST(RowSampler, ListsTheLikeliestWithRanks) {
  std::vector<float> z = random_logits(3000, 2.0f, 21);
  z[7] = z[9] = z[2000] = 20.0f;  // ties
  std::vector<int32_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return z[a] > z[b]; });
  std::vector<int32_t> many(100);
  std::iota(many.begin(), many.end(), 500);
  for (const int32_t k : {0, 1, 5, 20, 700, kAllTokens}) {
    for (const std::vector<int32_t>& ids : {std::vector<int32_t>{}, {11, 2000}, many}) {
      SamplingParams params = free_params();
      params.temperature = 0.6;
      params.top_logprobs = k;
      params.logprob_token_ids = ids;
      const Drawn drawn = draw_one(z, params, 0.37f);
      const auto& top = drawn.record.top;
      const size_t listed = std::min<size_t>(k, z.size());
      ASSERT_EQ(top.size(), 1 + listed + ids.size());
      EXPECT_EQ(top[0].token, drawn.record.token);
      EXPECT_EQ(top[0].logprob, drawn.record.raw);  // one array: equal as floats
      for (size_t i = 0; i < listed; ++i) {
        EXPECT_EQ(top[1 + i].token, order[i]);
        EXPECT_EQ(top[1 + i].rank, static_cast<int32_t>(i) + 1);
        if (order[i] == top[0].token) {
          EXPECT_EQ(top[1 + i].logprob, top[0].logprob);
          EXPECT_EQ(top[1 + i].rank, top[0].rank);
        }
      }
      for (size_t i = 0; i < ids.size(); ++i) {
        const TokenLogprob& asked = top[1 + listed + i];
        EXPECT_EQ(asked.token, ids[i]);
        EXPECT_EQ(order[asked.rank - 1], ids[i]);
      }
    }
  }
}

TEST(RowSampler, ProcessedListsHoldSurvivorsOnly) {
  const auto params = with([](auto& p) {
    p.top_k = 2;
    p.top_logprobs = 4;
    p.processed_logprobs = true;
    p.logprob_token_ids = {0, 1};
  });
  const auto top = draw_one(kFour, params, 0.9f).record.top;
  ASSERT_EQ(top.size(), 5u);
  EXPECT_EQ(top[0].token, 3);
  EXPECT_NEAR(top[0].logprob, std::log(3 / 7.), 1e-6);
  EXPECT_EQ(top[1].token, 1);
  EXPECT_EQ(top[2].token, 3);
  EXPECT_EQ(top[3].logprob, -kInf);  // 0 was cut
  EXPECT_EQ(top[3].rank, 4);
  EXPECT_EQ(top[4].logprob, top[1].logprob);
}

TEST(RowSampler, KeptMassIdentityAndExactLaws) {
  std::mt19937 random(5);
  const auto pick = [&](auto... values) {
    const std::vector<double> list = {static_cast<double>(values)...};
    return list[random() % list.size()];
  };
  for (uint32_t trial = 0; trial < 300; ++trial) {
    const auto vocab = static_cast<int32_t>(pick(1, 2, 17, 255, 256, 257, 1000, 4500));
    std::vector<float> z = random_logits(vocab, static_cast<float>(pick(0.05, 1.0, 4.0)), trial);
    for (size_t i = 0; i < z.size(); i += 3) z[i] = z[i / 2];  // ties
    SamplingParams params = free_params();
    params.temperature = pick(1.0, 0.7, 1.7);
    params.top_k = static_cast<int32_t>(pick(-1, 1, 2, 40, 700));
    params.top_k_ties = random() % 2 == 0;
    params.top_p = pick(1.0, 0.999, 0.6, 0.01);
    params.min_p = pick(0.0, 0.0, 0.003, 0.3);
    params.repetition_penalty = pick(1.0, 1.3, 0.8);
    params.presence_penalty = pick(0.0, 0.7, -1.0);
    params.frequency_penalty = pick(0.0, 0.3);
    params.logit_bias = {{static_cast<int32_t>(random() % vocab), 2.5f}};
    params.return_sampling_mask = true;
    std::vector<int32_t> prompt = {0};
    std::vector<int32_t> tokens;
    for (int i = 0; i < 6; ++i) {
      prompt.push_back(static_cast<int32_t>(random() % vocab));
      tokens.push_back(static_cast<int32_t>(random() % vocab));
    }
    const Response response(params, prompt, tokens);
    const ExactLaw law = exact_law(z, params, prompt, tokens);
    const Drawn drawn = draw_one(z, response.state, static_cast<float>(random() % 1000) / 1000);
    const TokenRecord& record = drawn.record;
    ASSERT_EQ(drawn.status, DrawStatus::kDrawn);
    EXPECT_NEAR(record.processed + record.log_kept_mass, drawn.logprob, 1e-5);
    // fp32 sums against double: at the very border of top_p or min_p a token may fall on either
    // side, which moves the kept mass by that token's.
    const auto survivors =
        std::count_if(law.p.begin(), law.p.end(), [](double p) { return p > 0; });
    if (!record.sampling_mask.empty()) {
      EXPECT_NEAR(static_cast<double>(record.sampling_mask.size()), survivors, 1.0);
    }
    if (record.sampling_mask.empty() ||
        static_cast<int64_t>(record.sampling_mask.size()) == survivors) {
      EXPECT_NEAR(std::exp(record.log_kept_mass), law.kept, 1e-5);
      EXPECT_NEAR(std::exp(record.processed), law.p[record.token], 1e-5);
      for (const int32_t id : record.sampling_mask) EXPECT_GT(law.p[id], 0.0);
    }
  }
}

// Pearson's statistic over tokens expected at least 5 times (the rest pooled), in standard
// deviations.
double chi_square_sigmas(std::vector<float> z, const SamplingParams& params, int draws) {
  const std::vector<int32_t> prompt = {0, 1};
  const std::vector<int32_t> tokens = {2, 3, 3};
  const Response response(params, prompt, tokens);
  const std::vector<double> p = exact_law(z, params, prompt, tokens).p;
  RowSampler sampler(static_cast<int32_t>(z.size()));
  sampler.load(z.data());
  Drawn drawn;
  std::vector<int64_t> count(z.size(), 0);
  for (int i = 0; i < draws; ++i) {
    sampler.draw(response.state,
                 uniform(NoiseKey{.seed = 9}, static_cast<uint64_t>(i)),
                 /*with_raw=*/false,
                 drawn);
    ++count[drawn.record.token];
  }
  double statistic = 0.0;
  double pooled_p = 0.0;
  int64_t pooled_count = 0;
  int cells = -1;
  const auto add = [&](int64_t seen, double expected) {
    statistic += (seen - expected) * (seen - expected) / expected;
    ++cells;
  };
  for (size_t id = 0; id < z.size(); ++id) {
    EXPECT_TRUE(p[id] > 0.0 || count[id] == 0) << "drew a token that was cut: " << id;
    if (p[id] * draws < 5) {
      pooled_p += p[id];
      pooled_count += count[id];
    } else {
      add(count[id], p[id] * draws);
    }
  }
  if (pooled_p * draws >= 5) add(pooled_count, pooled_p * draws);
  return cells > 0 ? (statistic - cells) / std::sqrt(2.0 * cells) : 0.0;
}

TEST(RowSampler, DrawsFollowTheExactLawForEachFilter) {
  const std::vector<std::pair<const char*, SamplingParams>> cases = {
      {"plain", free_params()},
      {"T 0.5", with([](auto& p) { p.temperature = 0.5; })},
      {"T 2", with([](auto& p) { p.temperature = 2.0; })},
      {"top_p", with([](auto& p) { p.top_p = 0.9; })},
      {"top_p at T", with([](auto& p) {
         p.top_p = 0.5;
         p.temperature = 0.7;
       })},
      {"top_k", with([](auto& p) { p.top_k = 5; })},
      {"min_p", with([](auto& p) { p.min_p = 0.05; })},
      {"min_p, top_k, top_p", with([](auto& p) {
         p.min_p = 0.01;
         p.top_k = 20;
         p.top_p = 0.8;
       })},
      {"large top_k", with([](auto& p) {
         p.top_k = 600;
         p.top_p = 0.95;
         p.temperature = 1.5;
       })},
      {"repetition", with([](auto& p) { p.repetition_penalty = 1.4; })},
      {"presence", with([](auto& p) { p.presence_penalty = 1.5; })},
      {"frequency", with([](auto& p) { p.frequency_penalty = -0.8; })},
      {"bias", with([](auto& p) { p.logit_bias = {{4, 2.0f}, {5, -100.0f}}; })},
      {"allowed", with([](auto& p) { p.allowed_token_ids = {1, 3, 4, 6}; })},
      {"min_tokens", with([](auto& p) {
         p.stop_token_ids = {1};
         p.min_tokens = 9;
       })},
  };
  for (const int32_t vocab : {7, 300, 1000}) {
    const std::vector<float> z = random_logits(vocab, 2.0f, 11);
    for (const auto& [name, params] : cases) {
      EXPECT_LT(chi_square_sigmas(z, params, 20000), 4.5) << name << ", vocabulary " << vocab;
    }
  }
}

// The trainer's full-vocabulary log-probability minus the kept mass is what the token was drawn by:
// with it the importance ratio averages to one over draws, without it it is biased by the mass.
TEST(Regression, kept_mass_corrects_ratio) {
  std::vector<float> z = random_logits(2000, 1.5f, 31);
  for (const auto& params : {with([](auto& p) { p.top_p = 0.8; }),
                             with([](auto& p) { p.top_k = 20; }),
                             with([](auto& p) { p.min_p = 0.1; })}) {
    const Response response(params, {0}, {});
    const ExactLaw law = exact_law(z, params, {0}, {});
    ASSERT_LT(law.kept, 0.9);
    RowSampler sampler(2000);
    sampler.load(z.data());
    Drawn drawn;
    double corrected = 0.0;
    double uncorrected = 0.0;
    const int draws = 2000;
    for (int i = 0; i < draws; ++i) {
      sampler.draw(response.state, (i + 0.5f) / draws, true, drawn);
      const double trainer = drawn.record.raw;  // same weights, T = 1
      corrected += std::exp(trainer - drawn.record.log_kept_mass - drawn.record.processed);
      uncorrected += std::exp(trainer - drawn.record.processed);
    }
    EXPECT_NEAR(corrected / draws, 1.0, 1e-5);
    EXPECT_NEAR(uncorrected / draws, law.kept, 1e-4);
  }
}

}  // namespace
}  // namespace banyan::rollout
