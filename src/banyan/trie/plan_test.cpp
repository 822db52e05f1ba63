// Cuts: both limits kept, every sample once, subtrees that fit kept whole, cost as low as any legal
// cutting.
#include "banyan/trie/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>

#include "banyan/testing/random_trie.h"

namespace banyan::trie {
namespace {

using testing::random_samples;
using testing::RandomTrieOptions;

std::vector<Sample> small_batch(uint64_t seed, int32_t max_samples) {
  RandomTrieOptions random;
  random.seed = seed;
  random.vocab = 3 + static_cast<int32_t>(seed % 4);
  random.depth = static_cast<int32_t>(seed % 5);
  random.max_samples = max_samples;
  random.duplicate = 0.3;
  random.prefix_of_another = 0.3;
  random.scored = 0.7;
  return random_samples(random);
}

std::vector<Sample> pick(const std::vector<Sample>& samples, const std::vector<int32_t>& indices) {
  std::vector<Sample> out;
  for (const int32_t s : indices) out.push_back(samples[s]);
  return out;
}

size_t longest(const std::vector<Sample>& samples) {
  size_t length = 0;
  for (const Sample& sample : samples) length = std::max(length, sample.tokens.size());
  return length;
}

// Within the limits, or one path over the budget with all samples on it.
bool legal(const std::vector<Sample>& samples, int64_t max_tokens, int64_t max_samples) {
  if (max_samples > 0 && static_cast<int64_t>(samples.size()) > max_samples) return false;
  const auto tokens = static_cast<size_t>(build(samples).num_tokens());
  return max_tokens == 0 || tokens <= static_cast<size_t>(max_tokens) || tokens == longest(samples);
}

TEST(Plan, NoLimitIsOneBlockWithThreeEntries) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = trie::plan(samples, {});
  ASSERT_EQ(plan.blocks.size(), 1u);
  ASSERT_EQ(plan.entries.size(), 3u);
  EXPECT_EQ(plan.entries[0].action, Action::kForward);
  EXPECT_EQ(plan.entries[1].action, Action::kLoss);
  EXPECT_EQ(plan.entries[2].action, Action::kBackward);
  EXPECT_EQ(plan.num_logical, 38);
  EXPECT_EQ(plan.num_unique, 17);
  EXPECT_EQ(plan.num_computed, 17);
  EXPECT_EQ(plan.blocks[0].trie.tok, build(samples).tok);
  EXPECT_EQ(plan.blocks[0].samples, (std::vector<int32_t>{2, 0, 3, 1, 4, 5, 6}));
  EXPECT_TRUE(plan.warnings.empty());
}

TEST(Plan, EmptyBatchHasNoBlocks) { EXPECT_TRUE(trie::plan({}, {}).blocks.empty()); }

TEST(Plan, BlocksAreTheTriesOfTheirSamplesAndKeepTheLimits) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Sample> samples = small_batch(seed, 30);
    PlanOptions options;
    options.max_tokens_per_block = 6 + static_cast<int64_t>(seed % 40);
    options.max_samples_per_block = seed % 3 == 0 ? 0 : 1 + static_cast<int64_t>(seed % 7);
    const Plan plan = trie::plan(samples, options);
    std::set<int32_t> seen;
    int64_t computed = 0;
    for (const Block& block : plan.blocks) {
      const std::vector<Sample> own = pick(samples, block.samples);
      EXPECT_TRUE(legal(own, options.max_tokens_per_block, options.max_samples_per_block));
      const Trie wanted = build(own);
      EXPECT_EQ(block.trie.tok, wanted.tok);
      EXPECT_EQ(block.trie.segments, wanted.segments);
      EXPECT_EQ(block.trie.sample_end, wanted.sample_end);
      EXPECT_EQ(block.trie.num_logical, wanted.num_logical);
      const Edges edges = edges_of(wanted, own);
      EXPECT_EQ(block.edges.source, edges.source);
      EXPECT_EQ(block.edges.token, edges.token);
      for (const int32_t s : block.samples) EXPECT_TRUE(seen.insert(s).second);
      computed += block.trie.num_tokens();
    }
    EXPECT_EQ(seen.size(), samples.size());
    EXPECT_EQ(plan.entries.size(), 3 * plan.blocks.size());
    EXPECT_EQ(plan.num_computed, computed);
    EXPECT_EQ(plan.num_unique, build(samples).num_tokens());
    EXPECT_EQ(plan.num_logical, build(samples).num_logical);
  }
}

TEST(Plan, SampleOrderDoesNotMatter) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<Sample> samples = small_batch(seed, 24);
    PlanOptions options;
    options.max_tokens_per_block = 25;
    const Plan plan = trie::plan(samples, options);
    std::reverse(samples.begin(), samples.end());
    const Plan reversed = trie::plan(samples, options);
    ASSERT_EQ(plan.blocks.size(), reversed.blocks.size());
    for (size_t b = 0; b < plan.blocks.size(); ++b) {
      EXPECT_EQ(plan.blocks[b].trie.tok, reversed.blocks[b].trie.tok);
      EXPECT_EQ(plan.blocks[b].edges.source, reversed.blocks[b].edges.source);
    }
  }
}

// The cheapest legal cutting by trying all sets of cuts of the depth-first order; a cut that splits
// a subtree that would fit is not legal.
int64_t exhaustive(const std::vector<Sample>& sorted, int64_t max_tokens, int64_t max_samples) {
  const auto size = static_cast<int32_t>(sorted.size());
  const Trie trie = build(sorted);
  std::vector<std::set<int32_t>> whole;  // samples of each subtree that fits
  for (int32_t u = 0; u < trie.num_tokens(); ++u) {
    std::set<int32_t> inside;
    for (int32_t s = 0; s < size; ++s) {
      if (u <= trie.sample_end[s] && trie.sample_end[s] < trie.tout[u]) inside.insert(s);
    }
    const std::vector<int32_t> list(inside.begin(), inside.end());
    if (legal(pick(sorted, list), max_tokens, max_samples)) whole.push_back(inside);
  }
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int32_t cuts = 0; cuts < (1 << (size - 1)); ++cuts) {
    int64_t cost = 0;
    bool good = true;
    for (int32_t a = 0; a < size && good;) {
      std::vector<int32_t> block = {a};
      while (++a < size && (cuts >> (a - 1) & 1) == 0) block.push_back(a);
      good = legal(pick(sorted, block), max_tokens, max_samples);
      for (const auto& inside : whole) {
        const auto first = *inside.begin();
        const auto last = *inside.rbegin();
        good = good && (last < block.front() || first > block.back() ||
                        (first >= block.front() && last <= block.back()));
      }
      if (good) cost += build(pick(sorted, block)).num_tokens() + 64;
    }
    if (good) best = std::min(best, cost);
  }
  return best;
}

TEST(Plan, NoLegalCuttingIsCheaper) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Sample> samples = small_batch(seed, 9);
    PlanOptions options;
    options.max_tokens_per_block = 4 + static_cast<int64_t>(seed % 17);
    options.max_samples_per_block = seed % 2 == 0 ? 0 : 4;
    const Plan plan = trie::plan(samples, options);
    std::vector<int32_t> order;
    for (const Block& block : plan.blocks) {
      order.insert(order.end(), block.samples.begin(), block.samples.end());
    }
    const int64_t cost = plan.num_computed + 64 * static_cast<int64_t>(plan.blocks.size());
    EXPECT_EQ(
        cost,
        exhaustive(
            pick(samples, order), options.max_tokens_per_block, options.max_samples_per_block));
  }
}

TEST(Plan, CutFallsAtTheForkNearestTheRoot) {
  // Two prompts of 4 tokens behind a template of 10; each has two responses of 6 tokens: 50 unique
  // tokens.
  std::vector<Sample> samples;
  for (int32_t prompt = 0; prompt < 2; ++prompt) {
    for (int32_t response = 0; response < 2; ++response) {
      Sample sample;
      sample.uid = 2 * prompt + response;
      sample.tokens.assign(10, 1);
      sample.tokens.insert(sample.tokens.end(), 4, 20 + prompt);
      sample.tokens.insert(sample.tokens.end(), 6, 40 + response);
      samples.push_back(sample);
    }
  }
  PlanOptions options;
  options.max_tokens_per_block =
      38;  // three responses would fit, but the second prompt's pair stays whole
  const Plan plan = trie::plan(samples, options);
  ASSERT_EQ(plan.blocks.size(), 2u);
  EXPECT_EQ(plan.blocks[0].samples, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(plan.num_unique, 42);
  EXPECT_EQ(plan.num_computed, 52);
  EXPECT_TRUE(plan.warnings.empty());
}

TEST(Plan, PathOverTheBudgetRunsAloneWithAWarning) {
  Sample long_one;
  long_one.uid = 7;
  long_one.tokens.assign(90, 5);
  Sample other;
  other.uid = 8;
  other.tokens = {5, 5, 6};
  Sample twin = long_one;
  twin.uid = 9;
  PlanOptions options;
  options.max_tokens_per_block = 51;
  const Plan plan = trie::plan({long_one, other, twin}, options);
  ASSERT_EQ(plan.blocks.size(), 2u);
  EXPECT_EQ(plan.blocks[0].samples, (std::vector<int32_t>{0, 2}));  // one path, two samples
  ASSERT_EQ(plan.warnings.size(), 2u);
  EXPECT_EQ(plan.warnings[0], "sample 7: 90 tokens exceed the budget of 51; it runs alone");
}

TEST(Plan, DuplicatesRespectTheSampleLimit) {
  std::vector<Sample> samples(7, Sample{0, {1, 2, 3}, {}, {}});
  PlanOptions options;
  options.max_samples_per_block = 3;
  const Plan plan = trie::plan(samples, options);
  EXPECT_EQ(plan.blocks.size(), 3u);
  EXPECT_EQ(plan.num_computed, 9);
}

TEST(Plan, NegativeLimitsAreRefused) {
  PlanOptions options;
  options.max_tokens_per_block = -1;
  EXPECT_THROW(trie::plan({}, options), std::invalid_argument);
  options = {};
  options.max_samples_per_block = -1;
  EXPECT_THROW(trie::plan({}, options), std::invalid_argument);
}

TEST(Plan, AMillionTokensTakeWellUnderASecond) {
  std::vector<Sample> samples;
  for (int32_t s = 0; s < 2048; ++s) {
    Sample sample;
    sample.uid = (s * 1021) % 2048;
    const auto uid = static_cast<int32_t>(sample.uid);
    for (int32_t t = 0; t < 500; ++t) {
      sample.tokens.push_back(t < 200 ? t : t < 250 ? uid / 8 + t : uid * 7919 + t);
    }
    samples.push_back(std::move(sample));
  }
  PlanOptions options;
  options.max_tokens_per_block = 16384;
  const auto begin = std::chrono::steady_clock::now();
  const Plan plan = trie::plan(samples, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  RecordProperty("milliseconds", static_cast<int>(seconds.count() * 1000));
  EXPECT_EQ(plan.num_logical, 1024000);
  EXPECT_EQ(plan.num_unique, 200 + 256 * 50 + 2048 * 250);
  EXPECT_LT(seconds.count(), 1.0);
}

}  // namespace
}  // namespace banyan::trie
