#include "banyan/parallel/pass_order.h"

#include <gtest/gtest.h>

#include <random>

namespace banyan::parallel {
namespace {

bool is_part(const std::string& part, const std::string& whole) {
  size_t at = 0;
  for (const char letter : whole) at += at < part.size() && part[at] == letter ? 1 : 0;
  return at == part.size();
}

}  // namespace

TEST(PassOrder, RanksThatAlternateAlikeLoseNothing) {
  EXPECT_EQ(common_order({"FBFB", "FB", ""}), "FBFB");
  EXPECT_EQ(common_order({"FFFF", "FF"}), "FFFF");
  EXPECT_EQ(common_order({"FFBB", "FB"}), "FFBB");
  EXPECT_EQ(common_order({"", ""}), "");
  EXPECT_EQ(common_order({"FBFB", "FFRR"}), "FBFRR");
}

TEST(PassOrder, EveryListIsAPartOfTheOrder) {
  std::mt19937 draw(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> passes(1 + draw() % 4);
    size_t total = 0;
    for (std::string& each : passes) {
      const size_t length = draw() % 9;
      for (size_t i = 0; i < length; ++i) each += draw() % 2 == 0 ? 'F' : 'B';
      total += length;
    }
    const std::string order = common_order(passes);
    EXPECT_LE(order.size(), total);
    for (const std::string& each : passes) EXPECT_TRUE(is_part(each, order)) << each << order;
  }
}

}  // namespace banyan::parallel
