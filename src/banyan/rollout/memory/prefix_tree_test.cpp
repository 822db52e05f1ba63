#include "banyan/rollout/memory/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace banyan::rollout {
namespace {

using Path = PrefixTree::Path;

// Tokens 0, 1, 2, ... with `last` at the end.
std::vector<int32_t> counting(int32_t length, int32_t last) {
  std::vector<int32_t> tokens(length);
  std::iota(tokens.begin(), tokens.end(), 0);
  tokens.back() = last;
  return tokens;
}

struct Paper {
  explicit Paper(int32_t pages, bool share = true) : pool(pages), tree(pool, share) {}

  Path insert(const std::vector<int32_t>& tokens, const std::string& salt = "") {
    return tree.insert(tokens, salt);
  }
  bool hold(const Path& path) { return tree.hold(path, 0, copies); }
  void drop(const Path& path) { tree.drop(path, 0, static_cast<int32_t>(path.size())); }
  // Computed, let go, and gone.
  void pass_through(const std::vector<int32_t>& tokens) {
    const Path path = insert(tokens);
    ASSERT_TRUE(hold(path));
    tree.advance(path, static_cast<int32_t>(tokens.size()));
    drop(path);
    tree.leave(path);
  }

  PagePool pool;
  PrefixTree tree;
  std::vector<PageCopy> copies;
};

TEST(PrefixTree, SharesWholePagesAndEqualTails) {
  Paper paper(8);
  const Path a = paper.insert(counting(150, 1000));
  const Path b = paper.insert(counting(150, 2000));
  const Path c = paper.insert(counting(150, 1000));
  const Path d = paper.insert(counting(140, 1000));
  EXPECT_EQ(a.size(), 3u);
  EXPECT_EQ(a, c);
  EXPECT_EQ(a[0], b[0]);
  EXPECT_EQ(a[1], b[1]);
  EXPECT_NE(a[2], b[2]);
  EXPECT_NE(a[2], d[2]) << "a tail is shared only by prompts that end there";
  EXPECT_EQ(paper.tree.node(a[0]).num_users, 4);
  EXPECT_EQ(paper.tree.num_nodes(), 5);
  EXPECT_NE(paper.insert(counting(150, 1000), "salt")[0], a[0]);
  for (const Path& path : {a, b, c, d}) paper.tree.leave(path);
  EXPECT_EQ(paper.tree.num_nodes(), 3) << "only what the salted path needs";
}

TEST(PrefixTree, EqualPagesUnderDifferentParentsAreDifferent) {
  Paper paper(8);
  std::vector<int32_t> first(2 * kPageTokens, 5);
  std::vector<int32_t> second = first;
  second[0] = 6;
  EXPECT_NE(paper.insert(first)[1], paper.insert(second)[1]);
}

TEST(PrefixTree, WithoutSharingEveryPromptIsAlone) {
  Paper paper(8, /*share=*/false);
  const Path a = paper.insert(counting(70, 1));
  EXPECT_NE(a[0], paper.insert(counting(70, 1))[0]);
  ASSERT_TRUE(paper.hold(a));
  paper.tree.advance(a, 70);
  paper.drop(a);
  EXPECT_EQ(paper.pool.num_free(), 8) << "nobody could find it";

  Paper sharing(8);
  const Path alone = sharing.tree.insert(counting(70, 1), "", /*share=*/false);
  EXPECT_NE(alone[0], sharing.insert(counting(70, 1))[0]);
}

TEST(PrefixTree, HoldsDropsAndCaches) {
  Paper paper(4);
  PrefixTree& tree = paper.tree;
  const Path a = paper.insert(counting(150, 1));
  const Path b = paper.insert(counting(150, 2));
  ASSERT_TRUE(paper.hold(a));
  EXPECT_EQ(paper.pool.num_free(), 1);
  tree.advance(a, 150);
  EXPECT_EQ(tree.computed(a), 150);
  EXPECT_EQ(tree.computed(b), 128) << "the trunk is there for b";
  EXPECT_EQ(tree.cost_of_hold(b, 0), 1);
  ASSERT_TRUE(paper.hold(b));
  EXPECT_EQ(paper.pool.num_free(), 0);
  EXPECT_EQ(tree.num_cached(), 0);
  EXPECT_EQ(tree.computed(b), 149) << "the tails differ in their last token";
  ASSERT_EQ(paper.copies.size(), 1u);
  EXPECT_EQ(paper.copies[0].from, tree.node(a[2]).page);
  EXPECT_EQ(paper.copies[0].to, tree.node(b[2]).page);

  paper.drop(a);
  tree.leave(a);
  EXPECT_EQ(tree.num_cached(), 1) << "the tail of a";
  paper.drop(b);
  EXPECT_EQ(tree.num_cached(), 4);
  EXPECT_EQ(tree.cost_of_hold(b, 0), 3);
  ASSERT_TRUE(tree.evict_one());
  EXPECT_EQ(tree.computed(a), 128) << "first what no path wants";
  ASSERT_TRUE(tree.evict_one());
  EXPECT_EQ(tree.node(b[2]).page, -1) << "then from the end";
  ASSERT_TRUE(tree.evict_one());
  EXPECT_EQ(tree.computed(b), 64);
  ASSERT_TRUE(tree.evict_one());
  EXPECT_FALSE(tree.evict_one());
  EXPECT_EQ(paper.pool.num_free(), 4);
  EXPECT_EQ(tree.num_evicted(), 4);
  tree.leave(b);
  EXPECT_EQ(tree.num_nodes(), 0);
}

TEST(PrefixTree, EvictsTheLeastRecentlyUsedSuffixesBeforeTrunks) {
  Paper paper(7);
  const std::vector<int32_t> old_prompt = counting(128, 500);
  const std::vector<int32_t> new_prompt(128, 7);
  paper.pass_through(old_prompt);
  paper.pass_through(new_prompt);
  paper.pass_through(counting(192, 500));  // another second page under the old prompt's first
  // Order of leaving: the rest of the old prompt, the new prompt from its end, then what was used
  // last from its end.
  const auto cached = [&](const std::vector<int32_t>& tokens) {
    const Path path = paper.insert(tokens);
    const int32_t computed = paper.tree.computed(path);
    paper.tree.leave(path);
    return computed;
  };
  EXPECT_EQ(paper.tree.num_cached(), 6);
  for (int32_t i = 0; i < 3; ++i) ASSERT_TRUE(paper.tree.evict_one());
  EXPECT_EQ(cached(old_prompt), 64);
  EXPECT_EQ(cached(new_prompt), 0);
  EXPECT_EQ(cached(counting(192, 500)), 192);
  for (const int32_t left : {128, 64, 0}) {
    ASSERT_TRUE(paper.tree.evict_one());
    EXPECT_EQ(cached(counting(192, 500)), left);
  }
}

TEST(PrefixTree, KeepsWhatAWaitingPathWants) {
  Paper paper(4);
  paper.pass_through(counting(128, 1));
  const Path wanted = paper.insert(counting(128, 1));
  paper.pass_through(std::vector<int32_t>(128, 9));  // used later, wanted by nobody
  ASSERT_TRUE(paper.tree.evict_one());
  ASSERT_TRUE(paper.tree.evict_one());
  EXPECT_EQ(paper.tree.computed(wanted), 128);
}

TEST(PrefixTree, HoldThatDoesNotFitChangesNothing) {
  Paper paper(2);
  const Path a = paper.insert(counting(64, 1));
  const Path b = paper.insert(counting(130, 2));
  ASSERT_TRUE(paper.hold(a));
  EXPECT_FALSE(paper.hold(b));
  EXPECT_EQ(paper.pool.num_free(), 1);
  paper.drop(a);
  paper.tree.leave(a);
  EXPECT_EQ(paper.pool.num_free(), 2) << "nothing of it was computed";
}

TEST(PrefixTree, ForgetsATail) {
  Paper paper(2);
  const Path a = paper.insert(counting(70, 1));
  ASSERT_TRUE(paper.hold(a));
  paper.tree.advance(a, 70);
  const int32_t page = paper.tree.node(a[1]).page;
  paper.pool.share(page);  // the child that goes on writing there
  paper.tree.forget_tail(a);
  EXPECT_EQ(paper.pool.holders(page), 1);
  EXPECT_EQ(paper.tree.computed(a), 64);
  paper.pool.release(page);
  paper.tree.drop(a, 0, 1);
  paper.tree.leave(a);
  EXPECT_EQ(paper.tree.num_cached(), 1);
}

TEST(PrefixTree, ComputedIsAPrefixAcrossChunks) {
  Paper paper(4);
  const Path a = paper.insert(counting(130, 1));
  ASSERT_TRUE(paper.hold(a));
  for (const int32_t end : {1, 63, 64, 65, 128, 129, 130}) {
    paper.tree.advance(a, end);
    EXPECT_EQ(paper.tree.computed(a), end);
  }
  paper.tree.rewind(a[2], 0);
  paper.tree.rewind(a[1], 5);
  EXPECT_EQ(paper.tree.computed(a), 69);
}

TEST(PrefixTree, PublishedPagesAreFoundByTheNextTurn) {
  Paper paper(8);
  PrefixTree& tree = paper.tree;
  const std::vector<int32_t> prompt = counting(64, 1);
  const Path trunk = paper.insert(prompt);
  ASSERT_TRUE(paper.hold(trunk));
  tree.advance(trunk, 64);
  const std::vector<int32_t> response(64, 5);
  const int32_t page = paper.pool.take();
  const int32_t node = tree.publish(trunk[0], response.data(), 64, page);
  ASSERT_GE(node, 0);
  EXPECT_EQ(paper.pool.holders(page), 2);
  // A sibling with the same tokens gives its page back for this one.
  const int32_t twin = paper.pool.take();
  EXPECT_EQ(tree.publish(trunk[0], response.data(), 64, twin), node);
  EXPECT_EQ(paper.pool.holders(twin), 0);
  EXPECT_EQ(paper.pool.holders(page), 3);

  std::vector<int32_t> next = prompt;
  next.insert(next.end(), response.begin(), response.end());
  next.push_back(9);
  const Path turn = paper.insert(next);
  EXPECT_EQ(tree.computed(turn), 128);
  EXPECT_EQ(turn[1], node);
  const Path match = tree.hold_match(trunk[0], next.data() + 64, 65);
  EXPECT_EQ(match, Path{node});
  paper.drop(match);
  // Somebody else is computing these tokens: not now.
  std::vector<int32_t> other = prompt;
  other.resize(128, 6);
  const Path planned = paper.insert(other);
  ASSERT_TRUE(paper.hold(planned));
  tree.advance(planned, 100);
  EXPECT_EQ(tree.publish(trunk[0], other.data() + 64, 64, paper.pool.take()), -1);
}

TEST(PrefixTree, ANewGenerationCannotBeMatched) {
  Paper paper(8);
  PrefixTree& tree = paper.tree;
  paper.pass_through(counting(100, 1));
  const Path held = paper.insert(counting(100, 2));
  ASSERT_TRUE(paper.hold(held));
  tree.advance(held, 100);
  tree.new_generation();
  EXPECT_EQ(tree.num_cached(), 0) << "without holders: freed at once";
  EXPECT_EQ(paper.pool.num_free(), 6);
  const Path again = paper.insert(counting(100, 2));
  EXPECT_EQ(tree.computed(again), 0);
  EXPECT_NE(again, held);
  const std::vector<int32_t> more(64, 3);
  EXPECT_EQ(tree.publish(held[0], more.data(), 64, 7), -1) << "nothing hangs on an old page";
  EXPECT_TRUE(tree.hold_match(held[0], counting(100, 2).data() + 64, 36).empty());
  paper.drop(held);
  EXPECT_EQ(paper.pool.num_free(), 8) << "with holders: freed when they let go";
  tree.leave(held);
  tree.leave(again);
  EXPECT_EQ(tree.num_nodes(), 0);
}

TEST(PrefixTree, ACopySourceMayBeEvictedForTheCopy) {
  Paper paper(1);
  std::vector<int32_t> tokens = counting(40, 1);
  paper.pass_through(tokens);
  tokens[30] = 999;
  const Path path = paper.insert(tokens);
  ASSERT_TRUE(paper.hold(path)) << "the only page, which holds the beginning already";
  EXPECT_TRUE(paper.copies.empty());
  EXPECT_EQ(paper.tree.computed(path), 30);
}

TEST(PrefixTree, RandomUseLeavesNothingBehind) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    Paper paper(12);
    std::vector<Path> held;
    for (int32_t step = 0; step < 300; ++step) {
      switch (random() % 4) {
        case 0: {
          std::vector<int32_t> tokens(1 + random() % 300, static_cast<int32_t>(random() % 2));
          tokens[tokens.size() / 2] = static_cast<int32_t>(random() % 3);
          const Path path = paper.insert(tokens, random() % 4 == 0 ? "salt" : "");
          if (paper.hold(path)) {
            paper.tree.advance(path, static_cast<int32_t>(random() % (tokens.size() + 1)));
            held.push_back(path);
          } else {
            paper.tree.leave(path);
          }
          break;
        }
        case 1:
          if (!held.empty()) {
            std::swap(held[random() % held.size()], held.back());
            paper.drop(held.back());
            paper.tree.leave(held.back());
            held.pop_back();
          }
          break;
        case 2:
          paper.tree.evict_one();
          break;
        default:
          if (random() % 10 == 0) paper.tree.new_generation();
      }
    }
    for (const Path& path : held) {
      paper.drop(path);
      paper.tree.leave(path);
    }
    EXPECT_EQ(paper.pool.num_free() + paper.tree.num_cached(), 12);
    while (paper.tree.evict_one()) {
    }
    EXPECT_EQ(paper.pool.num_free(), 12);
    EXPECT_EQ(paper.tree.num_nodes(), 0);
  }
}

}  // namespace
}  // namespace banyan::rollout
