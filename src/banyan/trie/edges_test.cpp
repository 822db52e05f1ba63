// Edges: one row per scored source, one edge per (source, next token), and the way back to the
// samples.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "banyan/testing/random_trie.h"
#include "banyan/trie/plan.h"

namespace banyan::trie {
namespace {

using Ints = std::vector<int32_t>;

bool is_scored(const Sample& sample, size_t t) {
  return t > 0 && (sample.scored.empty() || sample.scored[t] != 0);
}

void expect_edges(const std::vector<Sample>& samples, const BuildOptions& options) {
  const Trie trie = build(samples, options);
  LogicalTokens logical;
  const Edges edges = edges_of(trie, samples, &logical);
  std::map<int32_t, std::set<int32_t>> wanted;  // source -> child tokens
  size_t u = 0;
  ASSERT_EQ(logical.offsets.size(), samples.size() + 1);
  for (size_t s = 0; s < samples.size(); ++s) {
    const Ints path = trie.path(static_cast<int32_t>(s));
    EXPECT_EQ(logical.offsets[s], static_cast<int32_t>(u));
    for (size_t t = 1; t < path.size(); ++t) {
      if (!is_scored(samples[s], t)) continue;
      wanted[path[t - 1]].insert(samples[s].tokens[t]);
      ASSERT_LT(u, logical.edge.size());
      const int32_t row = logical.row[u];
      const int32_t edge = logical.edge[u];
      EXPECT_EQ(edges.source[row], path[t - 1]);
      EXPECT_EQ(edges.token[edge], samples[s].tokens[t]);
      EXPECT_TRUE(edges.row_offsets[row] <= edge && edge < edges.row_offsets[row + 1]);
      EXPECT_EQ(logical.block[u], 0);
      EXPECT_EQ(logical.position[u], static_cast<int32_t>(t));
      ++u;
    }
  }
  EXPECT_EQ(logical.offsets.back(), static_cast<int32_t>(u));
  EXPECT_EQ(logical.edge.size(), u);

  ASSERT_EQ(edges.source.size(), wanted.size());
  ASSERT_EQ(edges.row_offsets.size(), wanted.size() + 1);
  size_t row = 0;
  for (const auto& [source, tokens] : wanted) {
    EXPECT_EQ(edges.source[row], source);
    const Ints got(edges.token.begin() + edges.row_offsets[row],
                   edges.token.begin() + edges.row_offsets[row + 1]);
    EXPECT_EQ(got, Ints(tokens.begin(), tokens.end()));
    ++row;
  }
}

TEST(Edges, CasesAndRandomBatchesFollowTheDefinition) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const auto& test_case : testing::trie_cases(seed, 16 + static_cast<int32_t>(seed))) {
      SCOPED_TRACE(test_case.name);
      expect_edges(test_case.samples, {true, 1, 2});
      expect_edges(test_case.samples, {true, 2, 3});
      expect_edges(test_case.samples, {false, 1, 2});
    }
  }
}

TEST(Edges, ToyHasFifteenEdgesOfTwelveSources) {
  const std::vector<Sample> samples = testing::toy_samples();
  LogicalTokens logical;
  const Edges edges = edges_of(build(samples), samples, &logical);
  EXPECT_EQ(edges.token.size(), 15u);
  EXPECT_EQ(edges.source, (Ints{0, 1, 2, 3, 4, 5, 6, 9, 11, 12, 14, 15}));
  EXPECT_EQ(edges.row_offsets, (Ints{0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 13, 14, 15}));
  EXPECT_EQ(edges.token, (Ints{2, 3, 4, 5, 9, 6, 7, 11, 8, 10, 13, 14, 15, 2, 1}));
  EXPECT_EQ(logical.edge.size(), 31u);
}

TEST(Edges, OneMaskedSampleDoesNotHideTheTokenOfAnother) {
  const std::vector<Sample> samples = {{0, {5, 6, 7}, {}, {0, 0, 1}},
                                       {1, {5, 6, 7}, {}, {1, 1, 0}}};
  LogicalTokens logical;
  const Edges edges = edges_of(build(samples), samples, &logical);
  EXPECT_EQ(edges.source, (Ints{0, 1}));
  EXPECT_EQ(edges.token, (Ints{6, 7}));
  EXPECT_EQ(logical.edge, (Ints{1, 0}));
  EXPECT_EQ(logical.row, (Ints{1, 0}));
  EXPECT_EQ(logical.position, (Ints{2, 1}));
}

TEST(Edges, AnotherTriesSamplesAreOurBug) {
  const std::vector<Sample> samples = testing::toy_samples();
  const Trie trie = build(samples);
  EXPECT_THROW(edges_of(trie, {samples[0]}), std::logic_error);
}

}  // namespace
}  // namespace banyan::trie
