// The detectors on the specification's rows (B7), and on random batches against the definition.
#include "banyan/trie/sharing_detect.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <type_traits>

#include "banyan/testing/random_trie.h"
#include "banyan/trie/trie.h"

namespace banyan::trie {
namespace {

using testing::samples_from;
using Rows = std::vector<std::vector<int32_t>>;

Detection detect(const Rows& rows,
                 int32_t min_prefix_len,
                 int32_t min_group_size = 2,
                 const std::string& detector = "trie") {
  return make_detector(detector,
                       {.min_prefix_len = min_prefix_len, .min_group_size = min_group_size})
      ->detect(samples_from(rows));
}

const Rows kTwoTrees = {
    {1, 2, 3, 4, 5, 10}, {1, 2, 3, 20}, {1, 2, 3, 4, 5, 30}, {7, 8, 40}, {7, 8, 9, 50}};

TEST(SharingDetect, AnAbstractDetectorCannotBeMade) { EXPECT_TRUE(std::is_abstract_v<Detector>); }

TEST(SharingDetect, CommonPrefixLength) {
  EXPECT_EQ(common_prefix_len({{1, 2, 3}, {1, 2, 4}, {1, 2}}), 2);
  EXPECT_EQ(common_prefix_len({{1}, {2}}), 0);
  EXPECT_EQ(common_prefix_len({}), 0);
  EXPECT_EQ(common_prefix_len({{1, 2, 3}}), 3);
  EXPECT_EQ(common_prefix_len({{1, 2, 3}, {1, 2, 3}, {1, 2, 3}}), 3);
  EXPECT_EQ(common_prefix_len({{1, 2}, {1, 2, 3}, {1, 2, 4, 5}}), 2);
  EXPECT_EQ(common_prefix_len({{1, 2, 3, 4}, {1, 2, 3, 4, 5}, {1, 2, 3, 4, 6}}), 4);
  EXPECT_EQ(common_prefix_len({{1}, {1, 2}, {1, 2, 3}}), 1);
}

TEST(SharingDetect, TwoTreesUnderBothRules) {
  for (const char* rule : {"trie", "trie_online"}) {
    const Detection found = detect(kTwoTrees, 2, 2, rule);
    EXPECT_EQ(found.batch_size, 5) << rule;
    EXPECT_EQ(found.reuse_specs, (std::vector<ReuseSpec>{{1, 0, 3}, {2, 0, 5}, {4, 3, 2}})) << rule;
    EXPECT_EQ(found.provider_index, (std::vector<int32_t>{0, 0, 0, 3, 3}));
    EXPECT_EQ(found.prefix_lens, (std::vector<int32_t>{0, 3, 5, 0, 2}));
    EXPECT_EQ(found.is_provider, (std::vector<uint8_t>{1, 0, 0, 1, 0}));
    EXPECT_EQ(found.groups,
              (std::vector<SharingGroup>{{0, {0, 1}, 3, 0}, {1, {0, 2}, 5, 0}, {2, {3, 4}, 2, 3}}));
    EXPECT_EQ(found.group_ids, (std::vector<int32_t>{0, 0, 1, 2, 2}));
  }
}

TEST(SharingDetect, AChainReusesTheRowBefore) {
  for (const char* rule : {"trie", "trie_online"}) {
    const Detection found = detect({{1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}}, 3, 2, rule);
    EXPECT_EQ(found.reuse_specs, (std::vector<ReuseSpec>{{1, 0, 3}, {2, 1, 4}})) << rule;
  }
}

TEST(SharingDetect, OnlineRuleCountsTheRowsSoFar) {
  const Rows rows = {{1, 2, 10}, {1, 2, 20}, {1, 2, 30}};
  EXPECT_EQ(detect(rows, 1, 3, "trie_online").reuse_specs, (std::vector<ReuseSpec>{{2, 0, 2}}));
  // The trie's threshold is on all rows of the batch, so none of the first is left out.
  EXPECT_EQ(detect(rows, 1, 3).reuse_specs, (std::vector<ReuseSpec>{{1, 0, 2}, {2, 0, 2}}));
}

TEST(SharingDetect, OnlineRuleDoesNotRetreatToAShallowerNode) {
  // Row 3 matches row 2 on three tokens, which only two rows share; the node of two tokens has
  // four.
  const Rows rows = {{1, 2, 7}, {1, 2, 8}, {1, 2, 3, 4}, {1, 2, 3, 5}};
  EXPECT_EQ(detect(rows, 1, 3, "trie_online").reuse_specs, (std::vector<ReuseSpec>{{2, 0, 2}}));
  EXPECT_EQ(detect(rows, 1, 3).reuse_specs,
            (std::vector<ReuseSpec>{{1, 0, 2}, {2, 0, 2}, {3, 0, 2}}));
}

TEST(SharingDetect, NothingSharedAndEqualRows) {
  const Detection none = detect({{1, 2}, {1, 3}, {4, 5}}, 2);
  EXPECT_FALSE(none.has_sharing());
  EXPECT_EQ(none.group_ids, (std::vector<int32_t>{-1, -1, -1}));
  EXPECT_EQ(none.is_provider, (std::vector<uint8_t>{1, 1, 1}));
  const Detection equal = detect({{1, 2, 3}, {1, 2, 3}, {1, 2}}, 1);
  EXPECT_EQ(equal.reuse_specs, (std::vector<ReuseSpec>{{1, 0, 3}, {2, 0, 2}}));
  EXPECT_EQ(detect({}, 1).batch_size, 0);
}

TEST(SharingDetect, BadOptionsAndNamesAreRefused) {
  EXPECT_THROW(make_detector("prompt", {}), std::invalid_argument);
  EXPECT_THROW(make_detector("trie", {.min_prefix_len = 0}), std::invalid_argument);
  EXPECT_THROW(make_detector("trie_online", {.min_group_size = 1}), std::invalid_argument);
  EXPECT_THROW(detect({{1}, {}}, 1), std::invalid_argument);
}

// Kept tokens = unique tokens of the trie under the same thresholds, in every order of the rows; a
// provider comes earlier, and its own prefix is shorter.
TEST(SharingDetect, KeptTokensAreTheUniqueTokensInEveryOrder) {
  std::mt19937_64 draw(11);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::vector<Sample> samples =
        testing::random_samples({.seed = seed, .random_positions = seed % 3 == 0});
    const BuildOptions options{.share = true,
                               .min_prefix_len = static_cast<int32_t>(1 + seed % 4),
                               .min_group_size = static_cast<int32_t>(2 + seed % 3)};
    const int32_t unique = build(samples, options).num_tokens();
    for (int order = 0; order < 3; ++order) {
      std::shuffle(samples.begin(), samples.end(), draw);
      const Detection found =
          make_detector("trie", {options.min_prefix_len, options.min_group_size})->detect(samples);
      int64_t kept = 0;
      for (size_t row = 0; row < samples.size(); ++row) {
        kept += static_cast<int64_t>(samples[row].tokens.size()) - found.prefix_lens[row];
      }
      EXPECT_EQ(kept, unique) << seed;
      for (const ReuseSpec& spec : found.reuse_specs) {
        EXPECT_LT(spec.provider_idx, spec.reuse_idx);
        EXPECT_GT(spec.prefix_len, found.prefix_lens[spec.provider_idx]);
        EXPECT_GE(spec.prefix_len, options.min_prefix_len);
      }
    }
  }
}

// The older rule, written out pair by pair.
TEST(SharingDetect, OnlineRuleAgainstItsDefinition) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const std::vector<Sample> samples = testing::random_samples({.seed = seed, .vocab = 5});
    const DetectOptions options{static_cast<int32_t>(1 + seed % 3),
                                static_cast<int32_t>(2 + seed % 3)};
    std::vector<ReuseSpec> want;
    for (size_t row = 0; row < samples.size(); ++row) {
      const auto same = [&](size_t other) {
        return common_prefix_len({samples[row].tokens, samples[other].tokens});
      };
      int32_t deepest = 0;
      for (size_t other = 0; other < row; ++other) deepest = std::max(deepest, same(other));
      int32_t through = 1, provider = -1;
      for (size_t other = 0; other < row; ++other) {
        if (same(other) < deepest) continue;
        ++through;
        if (provider < 0) provider = static_cast<int32_t>(other);
      }
      if (deepest > 0 && deepest >= options.min_prefix_len && through >= options.min_group_size) {
        want.push_back({static_cast<int32_t>(row), provider, deepest});
      }
    }
    EXPECT_EQ(make_detector("trie_online", options)->detect(samples).reuse_specs, want) << seed;
  }
}

}  // namespace
}  // namespace banyan::trie
