// Random tries under random limits and every policy: the plan is right by the independent checker,
// keeps what was asked for, and does not depend on the order of the samples.
#include <gtest/gtest.h>

#include <algorithm>

#include "banyan/testing/plan_check.h"
#include "banyan/testing/random_trie.h"
#include "banyan/trie/detail/cutter.h"
#include "banyan/trie/plan.h"

namespace banyan::trie {
namespace {

constexpr Carry kCarries[] = {Carry::kAuto, Carry::kRetain, Carry::kRecompute, Carry::kReplay};

std::vector<Sample> random_batch(uint64_t seed) {
  testing::RandomTrieOptions random;
  random.seed = seed;
  random.vocab = 2 + static_cast<int32_t>(seed % 11);
  random.depth = static_cast<int32_t>(seed % 7);
  random.max_fan_out = seed % 5 == 0 ? 16 : 1 + static_cast<int32_t>(seed % 4);
  random.max_segment = 1 + static_cast<int32_t>(seed * 7 % 13);
  random.max_samples = 1 + static_cast<int32_t>(seed * 5 % 40);
  random.duplicate = seed % 3 == 0 ? 0.5 : 0.1;
  random.prefix_of_another = seed % 4 == 0 ? 0.5 : 0.1;
  random.scored = seed % 2 == 0 ? 1.0 : 0.6;
  random.random_positions = seed % 8 == 5;
  return testing::random_samples(random);
}

int64_t longest(const std::vector<Sample>& samples) {
  size_t length = 0;
  for (const Sample& sample : samples) length = std::max(length, sample.tokens.size());
  return static_cast<int64_t>(length);
}

// Budgets from one token to more than the batch, the longest path among them.
std::vector<int64_t> budgets(const std::vector<Sample>& samples) {
  const int64_t path = longest(samples);
  const int64_t all = build(samples).num_tokens();
  return {
      1, (path + 2) / 3, std::max<int64_t>(1, path - 1), path, path + 3, (path + all) / 2, all, 0};
}

void expect_right(const std::vector<Sample>& samples, const PlanOptions& options) {
  const Plan plan = trie::plan(samples, options);
  const std::vector<std::string> errors =
      testing::plan_errors(samples, options, plan, options.for_backward);
  ASSERT_TRUE(errors.empty()) << errors.size() << " errors, the first: " << errors[0];
  const bool path_fits =
      options.max_tokens_per_block == 0 || longest(samples) <= options.max_tokens_per_block;
  EXPECT_TRUE(!path_fits || options.max_samples_per_block > 0 || plan.warnings.empty());
  if (!options.for_backward || !path_fits) return;
  for (const Block& block : plan.blocks) {
    const auto ends = static_cast<int64_t>(block.samples.size());
    if (options.max_samples_per_block > 0 && options.carry == Carry::kAuto) {
      EXPECT_LE(ends, options.max_samples_per_block);
    }
    const bool open = !block.offered.empty();
    if (options.carry == Carry::kReplay) {
      EXPECT_FALSE(open);
    }
    if (open && options.carry == Carry::kRetain) {
      EXPECT_EQ(block.policy, CarryPolicy::kRetain);
    }
    if (open && options.carry == Carry::kRecompute) {
      EXPECT_EQ(block.policy, CarryPolicy::kRecompute);
    }
  }
  const bool copies = options.carry == Carry::kAuto || options.carry == Carry::kReplay;
  if (!copies && options.max_samples_per_block == 0) {
    EXPECT_EQ(plan.num_computed, plan.num_unique);
  }
}

TEST(PlanProperty, RandomTriesUnderEveryPolicyAndBudget) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    const std::vector<Sample> samples = random_batch(seed);
    for (const int64_t budget : budgets(samples)) {
      for (const Carry carry : kCarries) {
        for (const int64_t limit : {0, 1, 3}) {
          SCOPED_TRACE(::testing::Message() << "seed " << seed << " budget " << budget << " carry "
                                            << static_cast<int>(carry) << " limit " << limit);
          PlanOptions options;
          options.max_tokens_per_block = budget;
          options.max_samples_per_block = limit;
          options.carry = carry;
          options.build.share = seed % 10 != 9;
          options.build.min_group_size = seed % 6 == 5 ? 3 : 2;
          expect_right(samples, options);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(PlanProperty, NamedCasesUnderEveryPolicyAndBudget) {
  for (const auto& test_case : testing::trie_cases(5, 29)) {
    for (const int64_t budget : budgets(test_case.samples)) {
      for (const Carry carry : kCarries) {
        SCOPED_TRACE(::testing::Message() << test_case.name << " budget " << budget << " carry "
                                          << static_cast<int>(carry));
        PlanOptions options;
        options.max_tokens_per_block = budget;
        options.carry = carry;
        expect_right(test_case.samples, options);
        options.for_backward = false;
        expect_right(test_case.samples, options);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// What the cutter minimises is what the plan is said to cost.
TEST(PlanProperty, CutsArePricedAsPlansAre) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Sample> samples = random_batch(seed);
    PlanOptions options;
    options.max_tokens_per_block = longest(samples) + static_cast<int64_t>(seed % 3) * 4;
    options.max_samples_per_block = seed % 4 == 0 ? 3 : 0;
    options.cost.per_pair = 0.01;
    options.cost.per_block = seed % 2 == 0 ? 64.0 : 5.0;
    const detail::Order order = detail::order_samples(samples, options.build);
    const detail::CutList list = detail::cut(detail::ForkTree(samples, order), options);
    const Trie trie = build(samples, options.build);
    const double base = trie.num_tokens() + 0.01 * static_cast<double>(trie.num_pairs());
    EXPECT_EQ(list.forced, 0);
    const double cost = trie::plan(samples, options).modelled_seconds;
    if (samples.size() > 16) {
      EXPECT_NEAR(cost, list.cost + base, 1e-9 * cost);
    } else {
      EXPECT_LE(cost, list.cost + base + 1e-9 * cost);
    }
    int64_t tokens = 0;
    for (const detail::CutBlock& block : list.blocks) {
      tokens += block.tokens;
      EXPECT_LE(block.tokens + block.retained, options.max_tokens_per_block);
    }
    EXPECT_GE(tokens, trie.num_tokens());
  }
}

void expect_equal(const Plan& a, const Plan& b) {
  ASSERT_EQ(a.blocks.size(), b.blocks.size());
  EXPECT_EQ(a.entries, b.entries);
  for (size_t i = 0; i < a.blocks.size(); ++i) {
    EXPECT_EQ(a.blocks[i].trie.tok, b.blocks[i].trie.tok);
    EXPECT_EQ(a.blocks[i].trie.par, b.blocks[i].trie.par);
    EXPECT_EQ(a.blocks[i].trie.pos, b.blocks[i].trie.pos);
    EXPECT_EQ(a.blocks[i].trie.segments, b.blocks[i].trie.segments);
    EXPECT_EQ(a.blocks[i].carried, b.blocks[i].carried);
    EXPECT_EQ(a.blocks[i].offered, b.blocks[i].offered);
    EXPECT_EQ(a.blocks[i].policy, b.blocks[i].policy);
    EXPECT_EQ(a.blocks[i].edges.source, b.blocks[i].edges.source);
    EXPECT_EQ(a.blocks[i].edges.token, b.blocks[i].edges.token);
  }
}

TEST(PlanProperty, SampleOrderDoesNotMatter) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::vector<Sample> samples = random_batch(seed);
    PlanOptions options;
    options.max_tokens_per_block = longest(samples) + static_cast<int64_t>(seed % 3) * 4;
    options.max_samples_per_block = seed % 2 == 0 ? 0 : 3;
    const Plan plan = trie::plan(samples, options);
    std::reverse(samples.begin(), samples.end());
    std::rotate(samples.begin(), samples.begin() + samples.size() / 3, samples.end());
    expect_equal(plan, trie::plan(samples, options));
    expect_equal(plan, trie::plan(samples, options));
  }
}

TEST(PlanProperty, CutsAnywhereAreRight) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Sample> samples = random_batch(seed);
    const int32_t size = build(samples).num_tokens();
    std::vector<int32_t> cuts;
    for (int32_t u = 1; u < size; ++u) {
      if ((static_cast<uint64_t>(u) * 2654435761u + seed * 40503u) % 97 < 20) cuts.push_back(u);
    }
    for (const CarryPolicy policy : {CarryPolicy::kRetain, CarryPolicy::kRecompute}) {
      const Plan plan = plan_with_cuts(samples, cuts, policy);
      EXPECT_EQ(plan.blocks.size(), cuts.size() + 1);
      EXPECT_EQ(plan.num_computed, size);
      const std::vector<std::string> errors = testing::plan_errors(samples, {}, plan, false);
      ASSERT_TRUE(errors.empty()) << errors[0];
    }
  }
}

}  // namespace
}  // namespace banyan::trie
