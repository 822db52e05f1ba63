// The expected numbers were printed by transformers 4.57.6 (LlamaRotaryEmbedding, head size 16).
#include "banyan/nn/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace banyan::nn {
namespace {

constexpr int64_t kHeadDim = 16;
constexpr int64_t kMaxPositions = 4096;

struct Expected {
  RopeOptions options;
  std::vector<double> frequencies;
  double attention_factor;
  std::vector<double> cos_500;
  std::vector<double> sin_3000;
};

RopeOptions yarn() { return {.type = "yarn", .factor = 4.0, .original_max_positions = 1024}; }

std::vector<Expected> cases() {
  RopeOptions yarn_mscale = yarn();
  yarn_mscale.mscale = 0.707;
  yarn_mscale.mscale_all_dim = 1.0;
  yarn_mscale.truncate = false;
  const RopeOptions llama3 = {.type = "llama3",
                              .theta = 5e5,
                              .factor = 8.0,
                              .original_max_positions = 256,
                              .low_freq_factor = 1.0,
                              .high_freq_factor = 4.0};
  const Expected plain = {{},
                          {1.0,
                           3.162277639e-01,
                           1.000000015e-01,
                           3.162277862e-02,
                           9.999999776e-03,
                           3.162277862e-03,
                           1.000000047e-03,
                           3.162277862e-04},
                          1.0,
                          {-8.838492632e-01,
                           5.111761093e-01,
                           9.649660587e-01,
                           -9.946563244e-01,
                           2.836622000e-01,
                           -1.034245733e-02,
                           8.775825500e-01,
                           9.875259995e-01},
                          {2.191899717e-01,
                           -7.761467248e-02,
                           -9.997558594e-01,
                           5.814908147e-01,
                           -9.880316257e-01,
                           -6.201579049e-02,
                           1.411197782e-01,
                           8.126489520e-01}};
  Expected dynamic = plain;
  dynamic.options = {.type = "dynamic", .factor = 4.0};
  return {
      plain,
      dynamic,
      {{.type = "linear", .factor = 4.0},
       {2.5e-01,
        7.905694097e-02,
        2.500000037e-02,
        7.905694656e-03,
        2.499999944e-03,
        7.905694656e-04,
        2.500000119e-04,
        7.905694656e-05},
       1.0,
       {7.877144814e-01,
        -2.556895614e-01,
        9.977982640e-01,
        -6.885892153e-01,
        3.153223693e-01,
        9.228869677e-01,
        9.921976924e-01,
        9.992188215e-01},
       {7.450729609e-01,
        -9.998113513e-01,
        -3.877816498e-01,
        -9.879899025e-01,
        9.379999638e-01,
        6.960521340e-01,
        6.816387773e-01,
        2.349536121e-01}},
      {llama3,
       {1.0,
        1.939227581e-01,
        1.053823065e-02,
        9.115831344e-04,
        1.767766807e-04,
        3.428102355e-05,
        6.647869668e-06,
        1.289173156e-06},
       1.0,
       {-8.838492632e-01,
        -9.098008871e-01,
        5.284098387e-01,
        8.979128599e-01,
        9.960963130e-01,
        9.998531342e-01,
        9.999944568e-01,
        9.999998212e-01},
       {2.191899717e-01,
        -5.426666141e-01,
        1.974599212e-01,
        3.957123160e-01,
        5.058180690e-01,
        1.026618779e-01,
        1.994228736e-02,
        3.867510008e-03}},
      {yarn(),
       {1.0,
        3.162277639e-01,
        8.125000447e-02,
        1.976423711e-02,
        4.375000019e-03,
        7.905694656e-04,
        2.500000119e-04,
        7.905694656e-05},
       1.138629436111989,
       {-1.006376743e+00,
        5.820401907e-01,
        -1.112243652e+00,
        -1.021612644e+00,
        -6.585254073e-01,
        1.050826311e+00,
        1.129745483e+00,
        1.137740016e+00},
       {2.495761514e-01,
        -8.837435395e-02,
        -1.095354319e+00,
        4.408295453e-01,
        6.035014391e-01,
        7.925454378e-01,
        7.761339545e-01,
        2.675251067e-01}},
      {yarn_mscale,
       {1.0,
        3.162277639e-01,
        8.539863676e-02,
        1.912677661e-02,
        3.556971438e-03,
        7.905694656e-04,
        2.500000119e-04,
        7.905694656e-05},
       0.964326914892074,
       {-8.523196578e-01,
        4.929408729e-01,
        2.737336755e-01,
        -9.550780654e-01,
        -1.988437772e-01,
        8.899647593e-01,
        9.568029642e-01,
        9.635736346e-01},
       {2.113707960e-01,
        -7.484591752e-02,
        -9.525985122e-01,
        7.126873136e-01,
        -9.139498472e-01,
        6.712217927e-01,
        6.573226452e-01,
        2.265720963e-01}},
  };
}

TEST(RopeTable, EqualsTransformers) {
  for (const Expected& expected : cases()) {
    SCOPED_TRACE(expected.options.type);
    const at::Tensor frequencies = rope_frequencies(expected.options, kHeadDim);
    RopeTable table(expected.options, kHeadDim, kMaxPositions, {.dtype = at::kFloat});
    table.reserve(3001);
    EXPECT_DOUBLE_EQ(rope_attention_factor(expected.options), expected.attention_factor);
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
      const double frequency = expected.frequencies[i];
      EXPECT_NEAR(frequencies[i].item<float>(), frequency, 2.5e-7 * frequency) << i;
      // A last-bit difference of the frequency, which another processor may have, moves the angle
      // by this.
      const double angle_error = 1.3e-7 * frequency;
      EXPECT_NEAR(table.cos()[500][i].item<float>(), expected.cos_500[i], 2e-7 + 500 * angle_error)
          << i;
      EXPECT_NEAR(
          table.sin()[3000][i].item<float>(), expected.sin_3000[i], 2e-7 + 3000 * angle_error)
          << i;
    }
  }
}

TEST(RopeTable, GrowsWithoutChangingWhatItHeld) {
  RopeTable table({}, kHeadDim, kMaxPositions, {.dtype = at::kDouble});
  table.reserve(1);
  const at::Tensor before = table.cos();
  EXPECT_EQ(before.scalar_type(), at::kDouble);
  table.reserve(kMaxPositions + 5);
  EXPECT_GE(table.cos().size(0), kMaxPositions + 5);
  EXPECT_TRUE(table.cos().narrow(0, 0, before.size(0)).equal(before));
}

TEST(RopeTable, DynamicRefusesToPassTheTrainedLength) {
  RopeTable table({.type = "dynamic", .factor = 2.0}, kHeadDim, 64, {.dtype = at::kFloat});
  table.reserve(64);
  try {
    table.reserve(65);
    FAIL() << "a position past the trained length was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "[rope] position: wanted < 64 (the trained length; dynamic scaling past it is not "
                 "supported), got 64");
  }
}

TEST(RopeTable, UnknownRuleIsNamed) {
  EXPECT_THROW(rope_frequencies({.type = "longrope"}, kHeadDim), std::invalid_argument);
  EXPECT_THROW(rope_frequencies({}, 7), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::nn
