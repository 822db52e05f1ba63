// Integer arrays that trie attention derives from a trie once and reads in every layer.
//
// Segments that follow one another without a fork (a sample ends inside another's path, or a block
// begins there) are one *chain*.
// Path-grid tiles (forward): tile j of a chain holds path positions [64 j, 64 j + 64) as far as the
// chain's own tokens reach. Where all of them lie in the ancestors, it is the parent's tile; so a
// tile inside a trunk exists once, and one that straddles a fork exists once per branch.
// Chunks (backward): every chain cut into at most 64 tokens from its first one, their runs, the
// tiles of queries, and the order in which runs add to these (kernels/cpu/attention_backward.h).
// Tokens [0, num_carried) are keys only (ops/carry.h). Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/kernels/cpu/attention_backward.h"
#include "banyan/trie/trie.h"

namespace banyan::ops::detail {

struct Chain {
  int32_t begin = 0;  // packed tokens [begin, end)
  int32_t end = 0;
  int32_t tout = 0;     // end of the subtree
  int32_t parent = -1;  // chain, or -1 at a root
  int32_t depth = 0;    // ancestors of token `begin`
};

// In packed order.
std::vector<Chain> build_chains(const trie::Trie& trie);

struct TrieTiles {
  // CSR tile -> packed tokens at its path positions, ascending.
  std::vector<int32_t> token_offsets;
  std::vector<int32_t> tokens;
  // CSR chain -> tiles, ascending path position.
  std::vector<int32_t> list_offsets;
  std::vector<int32_t> lists;
  // Per packed token: its chain's list, and dep + 1.
  std::vector<const int32_t*> tile_list;
  std::vector<int32_t> visible;
  int64_t num_tiles() const { return static_cast<int64_t>(token_offsets.size()) - 1; }
};

// The pointers in tile_list go into `lists` of the returned object (moving keeps them, copying does
// not).
TrieTiles build_tiles(const trie::Trie& trie, int64_t num_carried = 0);

struct TrieChunks {
  std::vector<kernels::TrieChunk> chunks;
  int64_t first_own = 0;  // the first chunk of tokens that are not carried; no chunk holds both
  std::vector<kernels::ChunkRun> runs;
  std::vector<int32_t> turns;  // per run and tile of it
  // Tiles of queries: a chunk, or neighbouring ones as long as they are no more than 64 tokens.
  std::vector<int32_t> tile_begins;  // [tiles + 1]
  std::vector<int32_t> tile_turns;   // [tiles]
};

TrieChunks build_chunks(const trie::Trie& trie, int64_t num_carried = 0);

}  // namespace banyan::ops::detail
