#include "banyan/rollout/prefix_tree.h"

#include <gtest/gtest.h>

#include <numeric>

namespace banyan::rollout {
namespace {

// Tokens 0, 1, 2, ... with `last` at the end.
std::vector<int32_t> counting(int32_t length, int32_t last) {
  std::vector<int32_t> tokens(length);
  std::iota(tokens.begin(), tokens.end(), 0);
  tokens.back() = last;
  return tokens;
}

TEST(PrefixTree, SharesWholePagesAndEqualTails) {
  PagePool pool(8);
  PrefixTree tree(pool, /*share=*/true);
  const auto a = tree.insert(counting(150, 1000));
  const auto b = tree.insert(counting(150, 2000));
  const auto c = tree.insert(counting(150, 1000));
  const auto d = tree.insert(counting(140, 1000));
  EXPECT_EQ(a.size(), 3u);
  EXPECT_EQ(a, c);
  EXPECT_EQ(a[0], b[0]);
  EXPECT_EQ(a[1], b[1]);
  EXPECT_NE(a[2], b[2]);
  EXPECT_NE(a[2], d[2]) << "a tail is shared only by prompts that end there";
  EXPECT_EQ(tree.node(a[0]).num_users, 4);
  EXPECT_EQ(tree.num_nodes(), 5);
}

TEST(PrefixTree, EqualPagesUnderDifferentParentsAreDifferent) {
  PagePool pool(8);
  PrefixTree tree(pool, /*share=*/true);
  std::vector<int32_t> first(2 * kPageTokens, 5);
  std::vector<int32_t> second = first;
  second[0] = 6;
  EXPECT_NE(tree.insert(first)[1], tree.insert(second)[1]);
}

TEST(PrefixTree, WithoutSharingEveryPromptIsAlone) {
  PagePool pool(8);
  PrefixTree tree(pool, /*share=*/false);
  EXPECT_NE(tree.insert(counting(70, 1))[0], tree.insert(counting(70, 1))[0]);
}

TEST(PrefixTree, HoldsDropsAndCaches) {
  PagePool pool(4);
  PrefixTree tree(pool, /*share=*/true);
  const auto a = tree.insert(counting(150, 1));
  const auto b = tree.insert(counting(150, 2));
  ASSERT_TRUE(tree.hold(a, 0));
  EXPECT_EQ(pool.num_free(), 1);
  tree.advance(a, 150);
  EXPECT_EQ(tree.computed(a), 150);
  EXPECT_EQ(tree.computed(b), 128) << "the trunk is there for b";
  EXPECT_EQ(tree.cost_of_hold(b, 0), 1);
  ASSERT_TRUE(tree.hold(b, 0));
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(tree.num_cached(), 0);

  tree.drop(a, 0, 3);
  tree.leave(a);
  EXPECT_EQ(pool.num_free(), 1) << "the tail of a, which nobody wants any more";
  EXPECT_EQ(tree.computed(b), 128);
  tree.drop(b, 0, 3);
  EXPECT_EQ(tree.num_cached(), 3) << "b still has work";
  EXPECT_EQ(tree.cost_of_hold(b, 0), 3);
  ASSERT_TRUE(tree.evict_one());
  EXPECT_EQ(tree.node(b[2]).page, -1) << "the deepest page goes first";
  ASSERT_TRUE(tree.evict_one());
  EXPECT_EQ(tree.computed(b), 64);
  tree.leave(b);
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_FALSE(tree.evict_one());
}

TEST(PrefixTree, HoldThatDoesNotFitChangesNothing) {
  PagePool pool(2);
  PrefixTree tree(pool, /*share=*/true);
  const auto a = tree.insert(counting(64, 1));
  const auto b = tree.insert(counting(130, 2));
  ASSERT_TRUE(tree.hold(a, 0));
  EXPECT_FALSE(tree.hold(b, 0));
  EXPECT_EQ(pool.num_free(), 1);
  tree.drop(a, 0, 1);
  tree.leave(a);
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(PrefixTree, ForgetsATail) {
  PagePool pool(2);
  PrefixTree tree(pool, /*share=*/true);
  const auto a = tree.insert(counting(70, 1));
  ASSERT_TRUE(tree.hold(a, 0));
  tree.advance(a, 70);
  tree.forget_tail(a);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(tree.computed(a), 64);
  tree.drop(a, 0, 1);
  tree.leave(a);
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(PrefixTree, ComputedIsAPrefixAcrossChunks) {
  PagePool pool(4);
  PrefixTree tree(pool, /*share=*/true);
  const auto a = tree.insert(counting(130, 1));
  ASSERT_TRUE(tree.hold(a, 0));
  for (const int32_t end : {1, 63, 64, 65, 128, 129, 130}) {
    tree.advance(a, end);
    EXPECT_EQ(tree.computed(a), end);
  }
}

}  // namespace
}  // namespace banyan::rollout
