#include "banyan/core/param.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace banyan {
namespace {

TEST(ParamTable, GradientsAppearZeroedAndStay) {
  ParamTable table;
  table.add("w", at::ones({2, 3}));
  EXPECT_EQ(table.num_elements(), 6);
  table.ensure_grads();
  EXPECT_EQ(table.at("w").grad.sum().item<float>(), 0.0f);
  table.at("w").grad.fill_(2.0);
  table.ensure_grads();
  EXPECT_EQ(table.at("w").grad.sum().item<float>(), 12.0f);
  table.zero_grads();
  EXPECT_EQ(table.at("w").grad.sum().item<float>(), 0.0f);
}

TEST(ParamTable, RejectsDuplicatesAndUnknownNames) {
  ParamTable table;
  table.add("w", at::ones({1}));
  EXPECT_THROW(table.add("w", at::ones({1})), std::logic_error);
  EXPECT_THROW(table.at("v"), std::invalid_argument);
}

TEST(ParamTable, RepackRunsInRegistrationOrder) {
  ParamTable table;
  std::vector<int> calls;
  table.on_repack([&] { calls.push_back(1); });
  table.on_repack([&] { calls.push_back(2); });
  table.repack();
  EXPECT_EQ(calls, (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace banyan
