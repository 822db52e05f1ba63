// Keys and values carried between the blocks of a plan (specification A12).
//
// A trie cut under a token budget leaves blocks whose tokens attend to ancestors computed in
// earlier blocks. An earlier block *offers* the K and V of the tokens that later blocks attend to;
// they lie on one path, so a later block reads the first `count` of them. The backward goes the
// other way: a later block adds the fp32 gradients of what it read to the accumulators of the
// offering block, and the offering block's own backward adds those to its own sums and rounds once
// (A11).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/trie/trie.h"

namespace banyan::ops {

// What one open block offers, per layer. `k` and `v` are written by its first forward; a forward
// that runs again gives the same bits and leaves them. `dk` and `dv` appear with the first
// gradient.
struct CarryStore {
  std::vector<at::Tensor> k, v;    // [layer]: [n, K, D] compute dtype, after norm and RoPE
  std::vector<at::Tensor> dk, dv;  // [layer]: [n, K, D] fp32 (fp64 for fp64) sums of gradients

  bool has(int64_t layer) const;
  bool has_gradient(int64_t layer) const;
  // Zeroed accumulators of a layer, if they are not there yet.
  void ensure_gradient(int64_t layer);
  int64_t bytes() const;
};

// The first `count` tokens that an earlier block offers. The store is borrowed.
struct CarrySource {
  CarryStore* store = nullptr;
  int64_t count = 0;
};

// The part of a block's trie that other blocks compute or read.
struct BlockCarry {
  int64_t num_carried = 0;             // tokens [0, num_carried) of the trie are one path, computed
                                       // elsewhere
  std::vector<CarrySource> sources{};  // where their K and V come from, root first
  std::vector<int32_t> offered{};      // own tokens (index in the trie, ascending) for later blocks
  CarryStore* out = nullptr;           // theirs; borrowed, wanted where `offered` is not empty
};

// Throws [carry] unless the carried tokens are a path at the front of the trie, the counts of the
// sources sum to their number, and the offered tokens are own ones with a store.
void check_carry(const trie::Trie& trie, const BlockCarry& carry);

}  // namespace banyan::ops
