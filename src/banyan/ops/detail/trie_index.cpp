// Tiles and chunks of a trie; what they are stands in the header.
#include "banyan/ops/detail/trie_index.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/attention_tile.h"

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

namespace {

// Tile of a query.
int32_t tile_of(const TrieChunks& chunks, int32_t row) {
  const std::vector<int32_t>& begins = chunks.tile_begins;
  return static_cast<int32_t>(std::upper_bound(begins.begin(), begins.end(), row) -
                              begins.begin()) -
         1;
}

// Chunks [first, last) of one chain as runs, and their turns.
void add_runs(int32_t first, int32_t last, int32_t carried, TrieChunks& result) {
  for (int32_t chunk = first; chunk < last;) {
    kernels::ChunkRun run;
    run.first_chunk = chunk;
    run.last_chunk = std::min(chunk + static_cast<int32_t>(kernels::kRunChunks), last);
    run.turns = static_cast<int32_t>(result.turns.size());
    const kernels::TrieChunk& front = result.chunks[chunk];
    const int32_t begin = std::max(front.begin - carried, 0);  // queries [begin, end)
    const int32_t end = front.subtree_end - carried;
    if (begin < end) {
      run.first_tile = tile_of(result, begin);
      run.last_tile = tile_of(result, end - 1) + 1;
    }
    for (int32_t t = run.first_tile; t < run.last_tile; ++t) {
      result.turns.push_back(result.tile_turns[t]++);
    }
    result.runs.push_back(run);
    chunk = run.last_chunk;
  }
}

}  // namespace

TrieChunks build_chunks(const trie::Trie& trie, int64_t num_carried) {
  TrieChunks result;
  const auto carried = static_cast<int32_t>(num_carried);
  const auto tile = static_cast<int32_t>(kTileTokens);
  std::vector<int32_t> chain_chunks{0};  // first chunk of every chain
  result.tile_begins.push_back(0);
  for (const Chain& chain : build_chains(trie)) {
    for (int32_t begin = chain.begin; begin < chain.end;) {
      kernels::TrieChunk chunk;
      chunk.begin = begin;
      chunk.end = std::min(begin + tile, chain.end);
      if (begin < carried) {
        chunk.end = std::min(chunk.end, carried);
        ++result.first_own;
      } else if (chunk.end - carried - result.tile_begins.back() > tile) {
        result.tile_begins.push_back(begin - carried);
      }
      chunk.subtree_end = chain.tout;
      result.chunks.push_back(chunk);
      begin = chunk.end;
    }
    chain_chunks.push_back(static_cast<int32_t>(result.chunks.size()));
  }
  if (trie.num_tokens() > carried) result.tile_begins.push_back(trie.num_tokens() - carried);
  result.tile_turns.assign(result.tile_begins.size() - 1, 0);
  for (size_t c = 0; c + 1 < chain_chunks.size(); ++c) {
    add_runs(chain_chunks[c], chain_chunks[c + 1], carried, result);
    BANYAN_ASSERT(result.turns.size() <= INT32_MAX, "[trie_attention] turns");
  }
  return result;
}

}  // namespace banyan::ops::detail
