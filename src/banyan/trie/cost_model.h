// What a plan costs, as a sum of counts times fitted constants (specification A14):
//   t = per_block blocks + per_token tokens + per_pair pairs + per_head_row head rows
//     + per_fork forks + per_carry_byte bytes_per_carried_token carried tokens
//     + per_recomputed_token recomputed tokens
// Constants are seconds of forward and backward together. Torch-free.
#pragma once

#include <cstdint>

namespace banyan::trie {

// Counts over all blocks of a plan.
struct Counts {
  int64_t blocks = 0;
  int64_t tokens = 0;      // computed: replayed copies included, carried ones not
  int64_t pairs = 0;       // query-key pairs of the computed tokens: sum of (dep + 1)
  int64_t head_rows = 0;   // sources with a scored child
  int64_t forks = 0;       // branches beyond the first, roots included: what small branches cost
  int64_t carried = 0;     // tokens whose K, V a block takes from earlier ones, summed over blocks
  int64_t recomputed = 0;  // tokens of blocks that run their forward twice
};

// The default has no unit: a token costs 1, a block as much as 64 tokens (a half-filled row tile
// per layer), a recomputed token a third (a forward beside forward and backward), a carried token a
// hundredth. It stands where nothing is calibrated and orders plans by computed tokens.
struct CostModel {
  double per_block = 64.0;
  double per_token = 1.0;
  double per_pair = 0.0;
  double per_head_row = 0.0;
  double per_fork = 0.0;
  double per_carry_byte = 0.01;
  double per_recomputed_token = 1.0 / 3.0;
  // K and V forward, their gradients back, of one token over all layers:
  // layers x kv heads x head dim x 2 x (compute bytes + accumulator bytes).
  double bytes_per_carried_token = 1.0;

  double seconds(const Counts& counts) const;
};

}  // namespace banyan::trie
