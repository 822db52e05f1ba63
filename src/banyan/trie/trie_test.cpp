// The packed trie against the definition of A2, applied pair by pair to random batches.
#include "banyan/trie/trie.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "banyan/testing/random_trie.h"

namespace banyan::trie {
namespace {

using testing::random_samples;
using testing::RandomTrieOptions;
using testing::toy_samples;
using testing::trie_cases;

int32_t position(const Sample& sample, size_t t) {
  return sample.positions.empty() ? static_cast<int32_t>(t) : sample.positions[t];
}

size_t agreement(const Sample& a, const Sample& b) {
  size_t d = 0;
  while (d < a.tokens.size() && d < b.tokens.size() && a.tokens[d] == b.tokens[d] &&
         position(a, d) == position(b, d)) {
    ++d;
  }
  return d;
}

// Samples through the node of sample s at depth d, s included (A2 rule 1, thresholds included).
std::set<size_t> members(const std::vector<Sample>& samples,
                         const BuildOptions& options,
                         size_t s,
                         size_t d) {
  std::set<size_t> out = {s};
  if (!options.share) return out;
  for (size_t other = 0; other < samples.size(); ++other) {
    const size_t same = agreement(samples[s], samples[other]);
    if (same > d && same >= static_cast<size_t>(options.min_prefix_len)) out.insert(other);
  }
  if (out.size() < static_cast<size_t>(options.min_group_size)) return {s};
  return out;
}

void expect_definition(const std::vector<Sample>& samples, const BuildOptions& options) {
  const Trie trie = build(samples, options);
  std::vector<std::vector<int32_t>> paths;
  int64_t logical = 0;
  std::set<int32_t> seen;
  for (size_t s = 0; s < samples.size(); ++s) {
    paths.push_back(trie.path(static_cast<int32_t>(s)));
    ASSERT_EQ(paths[s].size(), samples[s].tokens.size());
    for (size_t d = 0; d < paths[s].size(); ++d) {
      const int32_t u = paths[s][d];
      EXPECT_EQ(trie.tok[u], samples[s].tokens[d]);
      EXPECT_EQ(trie.pos[u], position(samples[s], d));
      EXPECT_EQ(trie.dep[u], static_cast<int32_t>(d));
      EXPECT_EQ(trie.par[u], d == 0 ? -1 : paths[s][d - 1]);
      seen.insert(u);
    }
    logical += static_cast<int64_t>(paths[s].size());
  }
  EXPECT_EQ(trie.num_logical, logical);
  EXPECT_EQ(static_cast<int32_t>(seen.size()), trie.num_tokens());
  for (size_t s = 0; s < samples.size(); ++s) {
    for (size_t d = 0; d < paths[s].size(); ++d) {
      const std::set<size_t> wanted = members(samples, options, s, d);
      for (size_t other = 0; other < samples.size(); ++other) {
        const bool together = d < paths[other].size() && paths[other][d] == paths[s][d];
        ASSERT_EQ(together, wanted.count(other) == 1)
            << "samples " << s << " " << other << " at " << d;
      }
      EXPECT_EQ(trie.segments[trie.seg[paths[s][d]]].num_samples,
                static_cast<int32_t>(wanted.size()));
    }
  }
}

// What A3 and A4 promise of every layout.
void expect_layout(const Trie& trie) {
  int32_t begin = 0;
  for (int32_t n = 0; n < trie.num_segments(); ++n) {
    const Segment& segment = trie.segments[n];
    ASSERT_EQ(segment.begin, begin);
    ASSERT_LT(segment.begin, segment.end);
    begin = segment.end;
    EXPECT_EQ(segment.depth, trie.dep[segment.begin]);
    int32_t ancestors = 0;
    int32_t last = 0;
    for (int32_t i = trie.ancestor_offsets[n]; i < trie.ancestor_offsets[n + 1]; ++i) {
      EXPECT_LE(last, trie.ancestors[i].begin);
      last = trie.ancestors[i].end;
      ancestors += trie.ancestors[i].end - trie.ancestors[i].begin;
    }
    EXPECT_EQ(ancestors, segment.depth);
    if (segment.parent >= 0) {
      const Segment& parent = trie.segments[segment.parent];
      EXPECT_EQ(trie.par[segment.begin], parent.end - 1);
      EXPECT_GT(parent.num_samples, segment.num_samples);
    }
    for (int32_t u = segment.begin; u < segment.end; ++u) {
      EXPECT_EQ(trie.seg[u], n);
      EXPECT_EQ(trie.tout[u], segment.tout);
    }
  }
  EXPECT_EQ(begin, trie.num_tokens());
  int64_t pairs = 0;
  for (int32_t q = 0; q < trie.num_tokens(); ++q) {
    std::set<int32_t> ancestors;
    for (int32_t u = q; u >= 0; u = trie.par[u]) ancestors.insert(u);
    for (int32_t k = 0; k < trie.num_tokens(); ++k) {
      ASSERT_EQ(k <= q && q < trie.tout[k], ancestors.count(k) == 1)
          << "query " << q << " key " << k;
    }
    pairs += static_cast<int64_t>(ancestors.size());
  }
  EXPECT_EQ(trie.num_pairs(), pairs);
}

void expect_same_arrays(const Trie& a, const Trie& b) {
  EXPECT_EQ(a.tok, b.tok);
  EXPECT_EQ(a.pos, b.pos);
  EXPECT_EQ(a.dep, b.dep);
  EXPECT_EQ(a.par, b.par);
  EXPECT_EQ(a.tout, b.tout);
  EXPECT_EQ(a.seg, b.seg);
  EXPECT_EQ(a.segments, b.segments);
  EXPECT_EQ(a.ancestor_offsets, b.ancestor_offsets);
  EXPECT_EQ(a.ancestors, b.ancestors);
}

TEST(Trie, ToyVectorOfTheSpecification) {
  const Trie trie = build(toy_samples());
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(trie.num_logical, 38);
  EXPECT_EQ(trie.num_pairs(), 72);
  EXPECT_EQ(trie.tok, (Ints{1, 2, 3, 4, 5, 6, 7, 8, 11, 9, 10, 12, 13, 14, 15, 2, 1}));
  EXPECT_EQ(trie.par, (Ints{-1, 0, 1, 2, 3, 4, 5, 6, 5, 3, 9, -1, 11, 12, 12, 14, 15}));
  EXPECT_EQ(trie.tout, (Ints{11, 11, 11, 11, 9, 9, 8, 8, 9, 11, 11, 17, 17, 14, 17, 17, 17}));
  EXPECT_EQ(trie.segments,
            (std::vector<Segment>{{0, 3, 11, -1, 5, 0},
                                  {3, 4, 11, 0, 4, 3},
                                  {4, 6, 9, 1, 2, 4},
                                  {6, 8, 8, 2, 1, 6},
                                  {8, 9, 9, 2, 1, 6},
                                  {9, 11, 11, 1, 2, 4},
                                  {11, 13, 17, -1, 2, 0},
                                  {13, 14, 14, 6, 1, 2},
                                  {14, 17, 17, 6, 1, 2}}));
  EXPECT_EQ(trie.sample_end, (Ints{7, 10, 2, 8, 10, 13, 16}));
  EXPECT_EQ(trie.path(3), (Ints{0, 1, 2, 3, 4, 5, 8}));
  BuildOptions apart;
  apart.share = false;
  EXPECT_EQ(build(toy_samples(), apart).num_pairs(), 133);
}

TEST(Trie, EdgeCasesFollowTheDefinition) {
  for (const auto& test_case : trie_cases(3, 23)) {
    SCOPED_TRACE(test_case.name);
    for (const bool share : {true, false}) {
      BuildOptions options;
      options.share = share;
      expect_definition(test_case.samples, options);
      expect_layout(build(test_case.samples, options));
    }
  }
}

TEST(Trie, RandomBatchesFollowTheDefinitionUnderBothThresholds) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    RandomTrieOptions random;
    random.seed = seed;
    random.vocab = 2 + static_cast<int32_t>(seed % 5);
    random.depth = static_cast<int32_t>(seed % 7);
    random.max_fan_out = seed % 7 > 4 ? 2 : 4;
    random.max_samples = 20;
    random.random_positions = seed % 4 == 3;
    const std::vector<Sample> samples = random_samples(random);
    for (const int32_t min_prefix : {1, 3, 6}) {
      for (const int32_t min_group : {2, 3, 5, 40}) {
        const BuildOptions options{true, min_prefix, min_group};
        expect_definition(samples, options);
        expect_layout(build(samples, options));
      }
    }
  }
}

TEST(Trie, SampleOrderDoesNotMatter) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    RandomTrieOptions random;
    random.seed = seed;
    random.vocab = 5;
    random.duplicate = 0.4;
    std::vector<Sample> samples = random_samples(random);
    const BuildOptions options{true, 1, seed % 2 == 0 ? 2 : 3};
    const Trie trie = build(samples, options);
    std::vector<int32_t> ends_by_uid(samples.size());
    for (size_t s = 0; s < samples.size(); ++s) ends_by_uid[samples[s].uid] = trie.sample_end[s];
    std::reverse(samples.begin(), samples.end());
    std::rotate(samples.begin(), samples.begin() + samples.size() / 3, samples.end());
    const Trie permuted = build(samples, options);
    expect_same_arrays(trie, permuted);
    for (size_t s = 0; s < samples.size(); ++s) {
      EXPECT_EQ(permuted.sample_end[s], ends_by_uid[samples[s].uid]);
    }
  }
}

TEST(Trie, DuplicatesShareOnePath) {
  const Trie trie = build({{0, {7, 8, 9}, {}, {}}, {1, {7, 8, 9}, {}, {}}});
  EXPECT_EQ(trie.num_tokens(), 3);
  ASSERT_EQ(trie.num_segments(), 1);
  EXPECT_EQ(trie.segments[0].num_samples, 2);
  EXPECT_EQ(trie.sample_end, (std::vector<int32_t>{2, 2}));
}

TEST(Trie, EqualTokensAtOtherPositionsStayApart) {
  const Trie trie = build({{0, {7, 8}, {0, 1}, {}}, {1, {7, 8}, {0, 2}, {}}, {2, {7, 8}, {}, {}}});
  EXPECT_EQ(trie.tok, (std::vector<int32_t>{7, 8, 8}));
  EXPECT_EQ(trie.pos, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(trie.sample_end, (std::vector<int32_t>{1, 2, 1}));
}

TEST(Trie, EmptyBatchIsAnEmptyTrie) {
  const Trie trie = build({});
  EXPECT_EQ(trie.num_tokens(), 0);
  EXPECT_EQ(trie.ancestor_offsets, (std::vector<int32_t>{0}));
}

void expect_refused(const std::vector<Sample>& samples,
                    BuildOptions options,
                    const std::string& text) {
  try {
    build(samples, options);
    ADD_FAILURE() << "accepted, wanted: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Trie, BadInputIsNamed) {
  expect_refused({{41, {}, {}, {}}}, {}, "[trie] sample 41: wanted at least one token");
  expect_refused(
      {{42, {1, 2}, {0}, {}}}, {}, "[trie] sample 42 positions: wanted none or 2, got 1");
  expect_refused(
      {{43, {1, 2}, {}, {1, 1, 1}}}, {}, "[trie] sample 43 scored: wanted none or 2, got 3");
  expect_refused({}, {true, 0, 2}, "min_prefix_len: wanted >= 1, got 0");
  expect_refused({}, {true, 1, 1}, "min_group_size: wanted >= 2, got 1");
}

}  // namespace
}  // namespace banyan::trie
