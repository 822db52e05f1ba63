// Plans of small batches, number by number: the toy batch under the cuts that the specification
// names (A15), its edge cases, limits, policies, and what is refused.
#include "banyan/trie/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>

#include "banyan/testing/plan_check.h"
#include "banyan/testing/random_trie.h"
#include "banyan/trie/sharing_choice.h"

namespace banyan::trie {
namespace {

using Ints = std::vector<int32_t>;

std::vector<Sample> of_tokens(const std::vector<Ints>& rows) {
  std::vector<Sample> samples;
  for (const Ints& row : rows)
    samples.push_back({static_cast<int64_t>(samples.size()), row, {}, {}});
  return samples;
}

// `count` samples with a trunk in common and own tokens behind it.
std::vector<Sample> star(int32_t count, int32_t trunk, int32_t branch) {
  std::vector<Ints> rows(count, Ints(trunk, 1));
  for (int32_t s = 0; s < count; ++s) rows[s].insert(rows[s].end(), branch, 2 + s);
  return of_tokens(rows);
}

Plan checked(const std::vector<Sample>& samples, const PlanOptions& options) {
  Plan plan = trie::plan(samples, options);
  const auto errors = testing::plan_errors(samples, options, plan, options.for_backward);
  EXPECT_TRUE(errors.empty()) << errors[0];
  return plan;
}

// "F0 L0 F1 ...": the entries in short.
std::string text(const Plan& plan) {
  std::string out;
  for (const Entry& entry : plan.entries) {
    out += "FLRB"[static_cast<int>(entry.action)] + std::to_string(entry.block) + " ";
  }
  return out;
}

// Per block: "open" or "closed", carried + own tokens.
std::vector<std::string> shapes(const Plan& plan) {
  std::vector<std::string> out;
  for (const Block& block : plan.blocks) {
    const bool all = static_cast<int32_t>(block.offered.size()) == block.num_own();
    const char* kind = block.offered.empty() ? "closed " : all ? "open " : "mixed ";
    out.push_back(kind + std::to_string(block.num_carried) + "+" + std::to_string(block.num_own()));
  }
  return out;
}

using Strings = std::vector<std::string>;

TEST(Plan, NoLimitIsOneBlockWithThreeEntries) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = checked(samples, {});
  EXPECT_EQ(text(plan), "F0 L0 B0 ");
  EXPECT_EQ(plan.num_logical, 38);
  EXPECT_EQ(plan.num_unique, 17);
  EXPECT_EQ(plan.num_computed, 17);
  EXPECT_EQ(plan.num_pairs, 72);
  const Trie trie = build(samples);
  EXPECT_EQ(plan.blocks[0].trie.tok, trie.tok);
  EXPECT_EQ(plan.blocks[0].trie.segments, trie.segments);
  EXPECT_EQ(plan.blocks[0].trie.ancestors, trie.ancestors);
  EXPECT_EQ(plan.blocks[0].samples, (Ints{2, 0, 3, 1, 4, 5, 6}));
  EXPECT_TRUE(plan.warnings.empty());
}

TEST(Plan, EmptyBatchHasNoBlocks) { EXPECT_TRUE(trie::plan({}, {}).blocks.empty()); }

// The cuts of A15. Blocks are {carried path | own tokens}.
TEST(PlanWithCuts, ToyCutAtThreeSixEightTwelve) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = plan_with_cuts(samples, {3, 6, 8, 12}, CarryPolicy::kRecompute);
  ASSERT_TRUE(testing::plan_errors(samples, {}, plan, false).empty());
  EXPECT_EQ(shapes(plan),
            (Strings{"open 0+3", "open 3+3", "closed 6+2", "mixed 6+4", "closed 1+5"}));
  EXPECT_EQ(text(plan), "F0 L0 F1 F2 L2 B2 F3 L3 F4 L4 B4 R3 B3 R1 B1 R0 B0 ");
  const Block& third = plan.blocks[3];  // token 8, then 9 10 below 3, then the root 11
  EXPECT_EQ(third.trie.tok, (Ints{1, 2, 3, 4, 5, 6, 11, 9, 10, 12}));
  EXPECT_EQ(third.trie.par, (Ints{-1, 0, 1, 2, 3, 4, 5, 3, 7, -1}));
  EXPECT_EQ(third.trie.dep, (Ints{0, 1, 2, 3, 4, 5, 6, 4, 5, 0}));
  EXPECT_EQ(third.trie.tout, (Ints{9, 9, 9, 9, 7, 7, 7, 9, 9, 10}));
  EXPECT_EQ(third.carried, (std::vector<Carried>{{0, 3}, {1, 3}}));
  EXPECT_EQ(third.offered, (Ints{9}));
  EXPECT_EQ(third.samples, (Ints{3, 1, 4}));
  EXPECT_EQ(third.trie.sample_end, (Ints{6, 8, 8}));
  EXPECT_EQ(third.edges.source, (Ints{7, 9}));  // 9 -> 10; 12 -> 13, which stands in block 4
  EXPECT_EQ(third.edges.token, (Ints{10, 13}));
  EXPECT_EQ(plan.blocks[1].edges.source, (Ints{3, 4, 5}));
  EXPECT_EQ(plan.blocks[1].edges.token, (Ints{5, 9, 6, 7, 11}));
  EXPECT_EQ(plan.blocks[4].carried, (std::vector<Carried>{{3, 1}}));
  EXPECT_EQ(plan.num_recomputed, 3 + 3 + 4);
}

TEST(PlanWithCuts, ToyCutNearlyEverywhere) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = plan_with_cuts(samples, {1, 2, 3, 4, 5, 9, 13}, CarryPolicy::kRetain);
  ASSERT_TRUE(testing::plan_errors(samples, {}, plan, false).empty());
  EXPECT_EQ(shapes(plan),
            (Strings{"open 0+1",
                     "open 1+1",
                     "open 2+1",
                     "open 3+1",
                     "open 4+1",
                     "closed 5+4",
                     "mixed 4+4",
                     "closed 2+4"}));
}

TEST(PlanWithCuts, ToyCutAtSix) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = plan_with_cuts(samples, {6}, CarryPolicy::kRetain);
  ASSERT_TRUE(testing::plan_errors(samples, {}, plan, false).empty());
  EXPECT_EQ(shapes(plan), (Strings{"open 0+6", "closed 6+11"}));
  EXPECT_EQ(text(plan), "F0 L0 F1 L1 B1 B0 ");
  EXPECT_EQ(plan.blocks[1].trie.tout,
            (Ints{11, 11, 11, 11, 9, 9, 8, 8, 9, 11, 11, 17, 17, 14, 17, 17, 17}));
}

TEST(PlanWithCuts, ToyCutAtTwoAndEleven) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = plan_with_cuts(samples, {2, 11}, CarryPolicy::kRetain);
  ASSERT_TRUE(testing::plan_errors(samples, {}, plan, false).empty());
  EXPECT_EQ(shapes(plan), (Strings{"open 0+2", "closed 2+9", "closed 0+6"}));
  EXPECT_EQ(text(plan), "F0 F1 L1 B1 B0 F2 L2 B2 ");
}

TEST(PlanWithCuts, ToyCutAtThree) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan plan = plan_with_cuts(samples, {3}, CarryPolicy::kRetain);
  ASSERT_TRUE(testing::plan_errors(samples, {}, plan, false).empty());
  EXPECT_EQ(shapes(plan), (Strings{"open 0+3", "closed 3+14"}));
  EXPECT_EQ(plan.blocks[0].edges.token, (Ints{2, 3, 4}));  // 3 -> 4 belongs to its source
  EXPECT_EQ(plan.blocks[0].samples, (Ints{2}));
  // Sample 0 = 1 .. 8: its first three edges lie in block 0, the others in block 1.
  const LogicalTokens& logical = plan.logical;
  EXPECT_EQ(Ints(logical.block.begin(), logical.block.begin() + 7), (Ints{0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(Ints(logical.row.begin(), logical.row.begin() + 7), (Ints{0, 1, 2, 0, 1, 2, 3}));
  EXPECT_EQ(Ints(logical.edge.begin(), logical.edge.begin() + 7), (Ints{0, 1, 2, 0, 2, 3, 5}));
}

TEST(PlanWithCuts, OtherPositionsAreRefused) {
  const std::vector<Sample> samples = testing::toy_samples();
  for (const Ints& cuts : {Ints{0}, Ints{17}, Ints{3, 3}, Ints{5, 4}, Ints{-1}}) {
    EXPECT_THROW(plan_with_cuts(samples, cuts, CarryPolicy::kRetain), std::invalid_argument);
  }
}

TEST(Plan, TrunkIsRetainedWhereThatLeavesRoom) {
  PlanOptions options;
  options.max_tokens_per_block = 800;
  const Plan plan = checked(star(8, 400, 100), options);
  EXPECT_EQ(shapes(plan), (Strings{"open 0+400", "closed 400+400", "closed 400+400"}));
  EXPECT_EQ(text(plan), "F0 F1 L1 B1 F2 L2 B2 B0 ");
  EXPECT_EQ(plan.num_computed, plan.num_unique);
  EXPECT_EQ(testing::peak_live_tokens(plan), 800);
}

TEST(Plan, TrunkIsRecomputedWhereFewerBlocksPayForIt) {
  PlanOptions options;
  options.max_tokens_per_block = 600;
  const Plan plan = checked(star(8, 400, 100), options);
  EXPECT_EQ(shapes(plan), (Strings{"open 0+400", "closed 400+600", "closed 400+200"}));
  EXPECT_EQ(text(plan), "F0 F1 L1 B1 F2 L2 B2 R0 B0 ");
}

TEST(Plan, EveryPolicyCanBeForced) {
  PlanOptions options;
  options.max_tokens_per_block = 600;
  options.carry = Carry::kRecompute;
  const Plan recompute = checked(star(8, 400, 100), options);
  EXPECT_EQ(shapes(recompute), (Strings{"open 0+400", "closed 400+600", "closed 400+200"}));
  EXPECT_EQ(text(recompute), "F0 F1 L1 B1 F2 L2 B2 R0 B0 ");
  EXPECT_EQ(recompute.num_recomputed, 400);
  options.carry = Carry::kReplay;
  const Plan replay = checked(star(8, 400, 100), options);
  EXPECT_EQ(shapes(replay), Strings(4, "closed 0+600"));
  EXPECT_EQ(replay.num_computed, 4 * 600);
  options.carry = Carry::kRetain;
  const Plan retain = checked(star(8, 400, 100), options);
  EXPECT_EQ(retain.blocks[0].policy, CarryPolicy::kRetain);
  EXPECT_EQ(retain.blocks.size(), 5u);
}

TEST(Plan, SmallTrunksAreReplayedLargeOnesCarried) {
  PlanOptions options;
  options.max_tokens_per_block = 210;
  EXPECT_EQ(shapes(checked(star(4, 10, 100), options)), Strings(2, "closed 0+210"));
  options.max_tokens_per_block = 300;
  const Plan plan = checked(star(4, 100, 100), options);
  EXPECT_EQ(shapes(plan)[0], "open 0+100");
}

TEST(Plan, TurnsUnderABudgetOfTheirLongestPathAreComputedOnce) {
  // Eight conversations behind one system prompt of 200 tokens; ten turns of 60, re-sent each time.
  std::vector<Ints> rows;
  for (int32_t c = 0; c < 8; ++c) {
    for (int32_t turn = 1; turn <= 10; ++turn) {
      rows.emplace_back(200, 1);
      for (int32_t t = 0; t < 60 * turn; ++t) rows.back().push_back(1000 * (c + 1) + t);
    }
  }
  PlanOptions options;
  options.max_tokens_per_block = 800;
  const Plan plan = checked(of_tokens(rows), options);
  EXPECT_EQ(plan.num_computed, 200 + 8 * 600);
  EXPECT_EQ(plan.num_recomputed, 0);
  EXPECT_EQ(plan.blocks.size(), 9u);
  EXPECT_EQ(testing::peak_live_tokens(plan), 800);
}

TEST(Plan, PathLongerThanTheBudgetIsCut) {
  PlanOptions options;
  options.max_tokens_per_block = 30;
  std::vector<Sample> samples = of_tokens({Ints(100, 5), Ints(50, 5), {5, 5, 6}});
  const Plan plan = checked(samples, options);
  EXPECT_EQ(plan.num_computed, 101);
  EXPECT_LE(testing::peak_live_tokens(plan), 30);
  EXPECT_TRUE(plan.warnings.empty());
  EXPECT_EQ(shapes(plan).back(), "closed 71+30");  // as much as fits is not recomputed
  EXPECT_EQ(plan.num_recomputed, 71);
  options.carry = Carry::kReplay;
  const Plan forced = checked(samples, options);
  ASSERT_EQ(forced.warnings.size(), 1u);
  EXPECT_NE(forced.warnings[0].find("sharing.carry=replay and 0 samples per block (0 = any) cannot "
                                    "hold everywhere within 30 tokens"),
            std::string::npos)
      << forced.warnings[0];
}

TEST(Plan, PathOverTheLimitIsRefused) {
  PlanOptions options;
  options.max_path_tokens = 8;
  std::vector<Sample> samples = testing::toy_samples();
  trie::plan(samples, options);
  options.max_path_tokens = 7;
  try {
    trie::plan(samples, options);
    ADD_FAILURE() << "accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "[plan] sample 0: wanted at most max_path_tokens=7 tokens, got 8; shorten it or "
                 "raise sharing.max_path_tokens");
  }
}

TEST(Plan, DuplicatesRespectTheSampleLimit) {
  PlanOptions options;
  options.max_samples_per_block = 3;
  const Plan plan = checked(std::vector<Sample>(7, Sample{0, {1, 2, 3}, {}, {}}), options);
  EXPECT_EQ(plan.blocks.size(), 3u);
  EXPECT_EQ(plan.num_computed, 9);
}

TEST(Plan, WithoutSharingEverySampleIsATreeOfItsOwn) {
  PlanOptions options;
  options.build.share = false;
  options.max_tokens_per_block = 250;
  const Plan plan = checked(star(5, 80, 20), options);
  EXPECT_EQ(shapes(plan), (Strings{"closed 0+200", "closed 0+200", "closed 0+100"}));
  options.max_tokens_per_block = 60;
  EXPECT_EQ(checked(star(5, 80, 20), options).num_computed, 500);
}

TEST(Plan, EdgeCases) {
  PlanOptions options;
  options.max_tokens_per_block = 2;
  // One-token samples; empty suffixes; the same ids at other positions; nothing scored.
  EXPECT_EQ(checked(of_tokens({{3}, {5}, {3}}), options).num_computed, 2);
  checked(of_tokens({{1, 2, 3}, {1, 2, 3}, {1, 2}}), options);
  checked({{0, {7, 8, 9}, {0, 1, 2}, {}}, {1, {7, 8, 9}, {0, 1, 5}, {}}}, options);
  const Plan unscored = checked({{0, {7, 8, 9}, {}, {0, 0, 0}}}, options);
  EXPECT_EQ(unscored.logical.block.size(), 0u);
  EXPECT_EQ(text(unscored), "F0 F1 L1 B1 R0 B0 ");
  // Masks that differ on one token: it is shared, and each sample finds only what it scores.
  const Plan masks =
      checked({{0, {5, 6, 7}, {}, {0, 0, 1}}, {1, {5, 6, 7}, {}, {1, 1, 0}}}, options);
  EXPECT_EQ(masks.num_computed, 3);
  EXPECT_EQ(masks.logical.position, (Ints{2, 1}));
}

TEST(Plan, ScoringComputesEveryTokenOnceInFullBlocks) {
  PlanOptions options;
  options.for_backward = false;
  options.max_tokens_per_block = 600;
  const Plan plan = checked(star(8, 400, 100), options);  // 1200 tokens
  EXPECT_EQ(plan.num_computed, 1200);
  EXPECT_EQ(plan.blocks.size(), 2u);
  EXPECT_EQ(text(plan), "F0 L0 F1 L1 ");
  options.max_tokens_per_block = 50;
  EXPECT_EQ(checked(star(8, 400, 100), options).num_computed, 1200);
  options.max_tokens_per_block = 0;
  options.max_samples_per_block = 3;
  EXPECT_EQ(checked(star(8, 400, 100), options).blocks.size(), 3u);
}

TEST(Plan, NegativeLimitsAreRefused) {
  PlanOptions options;
  options.max_tokens_per_block = -1;
  EXPECT_THROW(trie::plan({}, options), std::invalid_argument);
  options = {};
  options.max_samples_per_block = -1;
  EXPECT_THROW(trie::plan({}, options), std::invalid_argument);
  options = {};
  options.max_path_tokens = -1;
  EXPECT_THROW(trie::plan({}, options), std::invalid_argument);
}

TEST(SharingChoice, FollowsTheSavingAndTheMargin) {
  EXPECT_FALSE(sharing_pays(of_tokens({{1, 2, 3}, {4, 5, 6}}), {}, 0.0));
  EXPECT_TRUE(sharing_pays(star(8, 100, 100), {}, 0.02));
  EXPECT_FALSE(sharing_pays(star(8, 1, 100), {}, 0.02));  // 7 of 808 tokens
  EXPECT_TRUE(sharing_pays(star(8, 1, 100), {}, 0.0));
}

TEST(SharingChoice, TreesThatSaveLittleAreTakenApart) {
  std::vector<Sample> samples = star(4, 1, 100);
  for (Sample sample : star(4, 100, 20)) {
    sample.uid += 4;
    sample.tokens.insert(sample.tokens.begin(), 9);
    samples.push_back(sample);
  }
  PlanOptions options;
  options.unshare_margin = 0.02;
  const Plan plan = checked(samples, options);
  EXPECT_EQ(plan.num_unique, 401 + 181);
  EXPECT_EQ(plan.num_computed, 404 + 181);
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
  for (const int64_t budget : {16384, 500}) {
    PlanOptions options;
    options.max_tokens_per_block = budget;
    const auto begin = std::chrono::steady_clock::now();
    const Plan plan = trie::plan(samples, options);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::cout << "1024000 tokens in blocks of " << budget << ": " << seconds.count() * 1000
              << " ms\n";
    EXPECT_EQ(plan.num_logical, 1024000);
    EXPECT_EQ(plan.num_unique, 200 + 256 * 50 + 2048 * 250);
    EXPECT_EQ(plan.num_computed, plan.num_unique);
    EXPECT_LT(seconds.count(), 1.0);
  }
}

// The checker itself must be able to fail.
TEST(PlanCheck, SeesDamage) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Plan good = plan_with_cuts(samples, {3, 6, 8, 12}, CarryPolicy::kRecompute);
  const auto expect_seen = [&](const char* what, const auto& damage) {
    Plan bad = good;
    damage(bad);
    EXPECT_FALSE(testing::plan_errors(samples, {}, bad, false).empty()) << what;
  };
  expect_seen("policy", [](Plan& p) { p.blocks[1].policy = CarryPolicy::kRetain; });
  expect_seen("carried", [](Plan& p) { --p.blocks[3].carried[1].count; });
  expect_seen("offered", [](Plan& p) { p.blocks[0].offered.pop_back(); });
  expect_seen("token", [](Plan& p) { ++p.blocks[2].trie.tok[7]; });
  expect_seen("parent", [](Plan& p) { p.blocks[3].trie.par[7] = 4; });
  expect_seen("subtree", [](Plan& p) { ++p.blocks[3].trie.tout[4]; });
  expect_seen("edge", [](Plan& p) { p.blocks[3].edges.token[0] = 11; });
  expect_seen("source", [](Plan& p) { p.blocks[3].edges.source[0] = 6; });
  expect_seen("logical edge", [](Plan& p) { std::swap(p.logical.edge[3], p.logical.edge[4]); });
  expect_seen("logical block", [](Plan& p) { p.logical.block[0] = 1; });
  expect_seen("sample", [](Plan& p) { std::swap(p.blocks[3].samples[0], p.blocks[4].samples[0]); });
  expect_seen("close", [](Plan& p) { p.blocks[1].close = 3; });
  expect_seen("entry order", [](Plan& p) { std::swap(p.entries[2], p.entries[3]); });
  expect_seen("entry missing", [](Plan& p) { p.entries.pop_back(); });
  expect_seen("count", [](Plan& p) { ++p.num_recomputed; });
}

}  // namespace
}  // namespace banyan::trie
