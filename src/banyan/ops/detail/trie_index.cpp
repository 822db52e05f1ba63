// Tiles and chunks of a trie; what they are stands in the header.
#include "banyan/ops/detail/trie_index.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/attention_tile.h"
#include "banyan/kernels/cpu/gemm.h"

namespace banyan::ops::detail {

using kernels::kTileTokens;

std::vector<Chain> build_chains(const trie::Trie& trie) {
  std::vector<Chain> chains;
  std::vector<int32_t> chain_of(trie.segments.size());
  for (size_t s = 0; s < trie.segments.size(); ++s) {
    const trie::Segment& segment = trie.segments[s];
    // The only child of the segment before: nothing else hangs on that one.
    const bool goes_on = segment.parent >= 0 && segment.begin == chains.back().end &&
                         segment.parent == static_cast<int32_t>(s) - 1 &&
                         segment.tout == chains.back().tout;
    if (goes_on) {
      chains.back().end = segment.end;
    } else {
      const int32_t parent = segment.parent < 0 ? -1 : chain_of[segment.parent];
      chains.push_back({segment.begin, segment.end, segment.tout, parent, segment.depth});
    }
    chain_of[s] = static_cast<int32_t>(chains.size()) - 1;
  }
  return chains;
}

TrieTiles build_tiles(const trie::Trie& trie, int64_t num_carried) {
  TrieTiles tiles;
  tiles.token_offsets.push_back(0);
  tiles.list_offsets.push_back(0);
  tiles.tile_list.resize(trie.tok.size());
  tiles.visible.resize(trie.tok.size());
  const std::vector<Chain> chains = build_chains(trie);
  std::vector<int32_t> path;
  for (const Chain& chain : chains) {
    const int64_t first_own = chain.depth / kTileTokens;  // first tile with a token of the chain
    if (chain.parent >= 0) {
      const int32_t list = tiles.list_offsets[chain.parent];
      for (int64_t j = 0; j < first_own; ++j) {
        const int32_t tile = tiles.lists[list + j];
        tiles.lists.push_back(tile);
      }
    }
    // Path positions first_own * 64 .. of the chain: the last few ancestors, then its own tokens.
    path.clear();
    const int64_t borrowed = chain.depth - first_own * kTileTokens;
    for (int32_t token = trie.par[chain.begin]; static_cast<int64_t>(path.size()) < borrowed;
         token = trie.par[token]) {
      path.push_back(token);
    }
    std::reverse(path.begin(), path.end());
    for (int32_t token = chain.begin; token < chain.end; ++token) path.push_back(token);
    const int64_t length = static_cast<int64_t>(path.size());
    // Descendants read the full tiles of a chain; the last one, if not full, serves its own queries
    // alone.
    const bool has_queries = chain.end > num_carried;
    for (int64_t first = 0; first < length; first += kTileTokens) {
      if (!has_queries && length - first < kTileTokens) break;
      tiles.lists.push_back(static_cast<int32_t>(tiles.num_tiles()));
      const int64_t last = std::min(first + kTileTokens, length);
      tiles.tokens.insert(tiles.tokens.end(), path.begin() + first, path.begin() + last);
      tiles.token_offsets.push_back(static_cast<int32_t>(tiles.tokens.size()));
    }
    tiles.list_offsets.push_back(static_cast<int32_t>(tiles.lists.size()));
  }
  for (size_t c = 0; c < chains.size(); ++c) {  // `lists` has its final place
    for (int32_t token = chains[c].begin; token < chains[c].end; ++token) {
      tiles.tile_list[token] = tiles.lists.data() + tiles.list_offsets[c];
      tiles.visible[token] = trie.dep[token] + 1;
    }
  }
  return tiles;
}

TrieChunks build_chunks(const trie::Trie& trie, int64_t num_carried) {
  TrieChunks result;
  std::vector<kernels::TrieChunk>& chunks = result.chunks;
  const std::vector<Chain> chains = build_chains(trie);
  std::vector<int32_t> last_of_chain(chains.size());
  std::vector<int32_t> first_at(trie.tok.size() + 1,
                                0);  // packed token -> first chunk not before it
  int64_t offset = 0;
  for (size_t c = 0; c < chains.size(); ++c) {
    const Chain& chain = chains[c];
    int32_t parent = chain.parent < 0 ? -1 : last_of_chain[chain.parent];
    for (int32_t begin = chain.begin; begin < chain.end;) {
      kernels::TrieChunk chunk;
      chunk.begin = begin;
      chunk.end = std::min<int32_t>(begin + kTileTokens, chain.end);
      if (begin < num_carried) {
        chunk.end = std::min<int32_t>(chunk.end, static_cast<int32_t>(num_carried));
        ++result.first_own;
      }
      chunk.offset = static_cast<int32_t>(offset);
      chunk.subtree_end = chain.tout;  // a packed token for now
      chunk.parent = parent;
      chunk.depth = parent < 0 ? 0 : chunks[parent].depth + 1;
      result.max_depth = std::max<int64_t>(result.max_depth, chunk.depth);
      offset += kernels::round_up(chunk.end - chunk.begin, kernels::kRowStep);
      BANYAN_ASSERT(offset <= INT32_MAX, "[trie_attention] padded tokens: ", offset);
      parent = static_cast<int32_t>(chunks.size());
      first_at[begin] = parent;
      chunks.push_back(chunk);
      begin = chunk.end;
    }
    last_of_chain[c] = parent;
  }
  first_at[trie.tok.size()] = static_cast<int32_t>(chunks.size());
  // A subtree ends where another chain begins, so at the first token of a chunk.
  for (kernels::TrieChunk& chunk : chunks) chunk.subtree_end = first_at[chunk.subtree_end];
  return result;
}

}  // namespace banyan::ops::detail
