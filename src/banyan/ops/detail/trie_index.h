// Integer arrays that trie attention derives from a trie once and reads in every layer.
//
// Path-grid tiles (forward): tile j of a segment holds path positions [64 j, 64 j + 64) as far as
// the segment's own tokens reach. Where all of them lie in the ancestors, it is the parent's tile;
// so a tile inside a trunk exists once, and one that straddles a fork exists once per branch.
// Chunks (backward): every segment cut into at most 64 tokens from its first one
// (kernels/cpu/attention_backward.h). Tokens [0, num_carried) are keys only (ops/carry.h).
// Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/kernels/cpu/attention_backward.h"
#include "banyan/trie/trie.h"

namespace banyan::ops::detail {

struct TrieTiles {
  // CSR tile -> packed tokens at its path positions, ascending.
  std::vector<int32_t> token_offsets;
  std::vector<int32_t> tokens;
  // CSR segment -> tiles, ascending path position.
  std::vector<int32_t> list_offsets;
  std::vector<int32_t> lists;
  // Per packed token: its segment's list, and dep + 1.
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
  int64_t max_depth = 0;
};

TrieChunks build_chunks(const trie::Trie& trie, int64_t num_carried = 0);

}  // namespace banyan::ops::detail
