// Seeded sample sets for tests of everything that walks a trie: random trees, and the named edge
// cases that every such test must pass. Torch-free; the same seed gives the same samples on every
// machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/sample.h"

namespace banyan::testing {

struct RandomTrieOptions {
  uint64_t seed = 0;
  int32_t vocab = 97;               // token ids are in [0, vocab)
  int32_t depth = 3;                // levels of forks, 0-6: 0 gives one path
  int32_t max_fan_out = 3;          // children of a fork: 1..max_fan_out
  int32_t max_segment = 5;          // tokens between two forks: 1..max_segment
  int32_t max_samples = 32;         // duplicates and prefixes included
  bool one_token_suffixes = false;  // the last segment of every sample is one token
  double duplicate = 0.1;           // probability that a sample comes twice
  double prefix_of_another = 0.1;   // probability that a proper prefix of a sample is a sample too
  double scored =
      1.0;  // < 1: each token is scored with this probability (masks differ on shared tokens)
  bool random_positions = false;  // path positions with gaps instead of 0, 1, 2, ...
};

// Samples in shuffled order with uids 0, 1, 2, ... of that order. At least one sample, none empty.
std::vector<Sample> random_samples(const RandomTrieOptions& options);

struct TrieCase {
  std::string name;  // usable in a test's name: letters, digits, underscores
  std::vector<Sample> samples;
};

// Samples of the given tokens with uids 0, 1, 2, ...; every token scored.
std::vector<Sample> samples_from(const std::vector<std::vector<int32_t>>& rows);

// The toy batch of the specification (A15): 7 samples, 38 logical tokens, 17 unique ones, ids
// below 16.
std::vector<Sample> toy_samples();

// The edge cases: toy, one_node, one_token_samples, one_path, all_shared, none_shared, duplicates,
// prefix_of_another, one_token_suffixes, empty_response, depth_6, wide_fork, long_trunk,
// masks_differ, nothing_scored, positions_with_gaps, and three mixed random trees. vocab >= 16.
// Every case is small (at most ~200 unique tokens, long_trunk ~300), so that dense fp64 oracles
// stay cheap.
std::vector<TrieCase> trie_cases(uint64_t seed, int32_t vocab);

}  // namespace banyan::testing
