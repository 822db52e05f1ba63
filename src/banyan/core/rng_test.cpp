#include "banyan/core/rng.h"

#include <gtest/gtest.h>

namespace banyan {
namespace {

// Known-answer vectors published with the Random123 library (philox4x32-10).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0),
            (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull),
            (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(Uniform, IsAFunctionOfItsKeyAlone) {
  const NoiseKey key{.seed = 1, .step = 2, .row = 3, .index = 4};
  EXPECT_EQ(uniform(key, 5), uniform(key, 5));
  EXPECT_NE(uniform(key, 5), uniform(key, 6));
  EXPECT_NE(uniform(key, 5), uniform(NoiseKey{.seed = 1, .step = 2, .row = 3, .index = 5}, 5));
  EXPECT_NE(uniform(key, 5), uniform(NoiseKey{.seed = 1, .step = 3, .row = 3, .index = 4}, 5));
}

TEST(Uniform, MeanIsOneHalf) {
  double sum = 0;
  for (uint64_t position = 0; position < 100000; ++position) {
    const float draw = uniform(NoiseKey{}, position);
    ASSERT_GE(draw, 0.0f);
    ASSERT_LT(draw, 1.0f);
    sum += draw;
  }
  EXPECT_NEAR(sum / 100000, 0.5, 0.005);
}

}  // namespace
}  // namespace banyan
