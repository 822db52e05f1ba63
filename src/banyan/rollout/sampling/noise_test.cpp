// Whose noise is whose.
#include "banyan/rollout/sampling/noise.h"

#include <gtest/gtest.h>

#include <cmath>

namespace banyan::rollout {
namespace {

bool same(const NoiseKey& a, const NoiseKey& b) {
  return a.seed == b.seed && a.step == b.step && a.row == b.row && a.index == b.index;
}

Request request_of(std::vector<int32_t> prompt, uint64_t seed) {
  Request request;
  request.prompt = std::move(prompt);
  request.params.seed = seed;
  return request;
}

TEST(Noise, TrainingIsKeyedBySeedStepRowIndex) {
  Request request = request_of({1, 2, 3}, 7);
  request.row = 12;
  request.params.step = 5;
  EXPECT_TRUE(same(noise_key(request, 3), {.seed = 7, .step = 5, .row = 12, .index = 3}));
  request.prompt = {4};  // says nothing
  EXPECT_TRUE(same(noise_key(request, 3), {.seed = 7, .step = 5, .row = 12, .index = 3}));
}

TEST(Noise, AGroupEqualsSingleRequestsWithSeedsInARow) {
  const Request group = request_of({1, 2, 3}, 7);
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(same(noise_key(group, i), noise_key(request_of({1, 2, 3}, 7 + i), 0)));
  }
}

TEST(Noise, AContinuationKeepsItsPromptsNoise) {
  Request rest = request_of({1, 2, 3, 8, 9}, 7);
  EXPECT_FALSE(same(noise_key(rest, 0), noise_key(request_of({1, 2, 3}, 7), 0)));
  rest.original_prompt = 3;
  EXPECT_TRUE(same(noise_key(rest, 0), noise_key(request_of({1, 2, 3}, 7), 0)));
}

TEST(Noise, DigestsDiffer) {
  EXPECT_NE(prompt_digest({1, 2}, 2), prompt_digest({2, 1}, 2));
  EXPECT_NE(prompt_digest({0}, 1), prompt_digest({0, 0}, 2));
  EXPECT_NE(prompt_digest({1, 2}, 2), prompt_digest({1, 2}, 1));
  EXPECT_EQ(prompt_digest({1, 2, 3}, 2), prompt_digest({1, 2}, 2));
}

// One seed for many prompts: their uniform numbers must not go together.
TEST(Noise, OneSeedGivesEveryPromptItsOwn) {
  constexpr int kPrompts = 60;
  constexpr int kPositions = 400;
  double worst = 0.0;
  for (int32_t a = 0; a < kPrompts; ++a) {
    const NoiseKey one = noise_key(request_of({100, 200, a}, 42), 0);
    const NoiseKey other = noise_key(request_of({100, 200, a + 1}, 42), 0);
    double sum = 0.0;
    for (uint64_t position = 0; position < kPositions; ++position) {
      sum += (uniform(one, position) - 0.5) * (uniform(other, position) - 0.5) * 12.0;
    }
    worst = std::max(worst, std::abs(sum) / std::sqrt(kPositions));
  }
  EXPECT_LT(worst, 4.5);  // standard deviations; equal noise would give 20
}

}  // namespace
}  // namespace banyan::rollout
