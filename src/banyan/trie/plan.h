// From a batch to the ordered list of blocks that a pass walks: {forward, loss, backward} entries.
//
// A block is the trie of a subset of the samples. A cut falls at a fork; the trunk above it is
// computed again in each block that needs it (replay, specification A12 rule 6). Every sample is in
// exactly one block. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/trie/trie.h"

namespace banyan::trie {

// Scored edges of a block (specification A6): one head row per *source* token, one log-probability
// per unique (source -> next token) edge, and where each edge goes in the samples.
struct Edges {
  std::vector<int32_t> source;       // [R] packed token of each head row, ascending
  std::vector<int32_t> row_offsets;  // [R + 1] edges of row r: [row_offsets[r], row_offsets[r+1])
  std::vector<int32_t> token;        // [X] child token id of each edge; ascending inside a row

  // Scored logical tokens of the block, sample by sample, each sample's in order: [U].
  std::vector<int32_t> logical_edge;      // [U] its edge
  std::vector<int32_t> logical_row;       // [U] its head row (entropy is per row)
  std::vector<int32_t> logical_sample;    // [U] index into Block::samples
  std::vector<int32_t> logical_position;  // [U] index of the token in its sample
  std::vector<int32_t> logical_offsets;   // [S_b + 1] per sample of the block
};

struct Block {
  std::vector<int32_t> samples;  // indices into the batch, in the order of trie.sample_end
  Trie trie;
  Edges edges;
};

enum class Action : uint8_t { kForward, kLoss, kBackward };

struct Entry {
  Action action = Action::kForward;
  int32_t block = 0;
};

struct PlanOptions {
  BuildOptions build;
  int64_t max_tokens_per_block = 0;   // unique tokens, replayed ones included; 0 = no limit
  int64_t max_samples_per_block = 0;  // samples that end in one block; 0 = no limit
};

struct Plan {
  std::vector<Block> blocks;
  std::vector<Entry> entries;  // with no cut: {forward 0, loss 0, backward 0}
  int64_t num_logical = 0;     // T0 of the batch
  int64_t num_unique = 0;      // T1 of the uncut trie
  int64_t num_computed = 0;    // tokens of all blocks, replayed trunks included
  std::vector<std::string>
      warnings;  // "sample 7: 900 tokens exceed the budget of 512; it runs alone"
};

// Cuts the batch into blocks under both limits. Samples are taken in depth-first order of the whole
// trie, so a block holds neighbours; a subtree that fits is kept whole. A path longer than the
// budget runs alone with a warning. Deterministic and independent of sample order. Throws [plan] on
// negative limits, [trie] as build.
Plan plan(const std::vector<Sample>& samples, const PlanOptions& options);

// Edges of a trie whose samples are `samples` (same order as trie.sample_end).
Edges edges_of(const Trie& trie, const std::vector<Sample>& samples);

}  // namespace banyan::trie
