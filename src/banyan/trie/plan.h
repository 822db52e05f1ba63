// From a batch to the ordered list of blocks that a pass walks: {forward, loss, recompute,
// backward} entries (specification A12).
//
// A plan lays all samples out as one trie in packed order and cuts that order into blocks of
// contiguous tokens. The ancestors of a block's tokens that stand in earlier blocks form one path;
// their K and V are *carried* in, and their gradients back. So a block's local trie is
//   [ carried path | own tokens ]      carried path: dep 0, 1, ..., num_carried - 1
// A block whose tokens have descendants in later blocks is *open*: it offers the K and V of the
// path that leads out of it, and its backward waits until those descendants had theirs. Until then
// its activations are kept (retain), or dropped and computed again (recompute). The third way to
// deal with a trunk, *replay*, is no carry at all: samples that need the trunk in another block
// are not merged with the others, so each of the blocks computes a copy.
// Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/trie/cost_model.h"
#include "banyan/trie/trie.h"

namespace banyan::trie {

// Scored edges (specification A6): one head row per *source* token and one log-probability per
// unique (source -> next token) edge. An edge belongs to the block of its source; the next token
// itself may stand in a later block.
struct Edges {
  std::vector<int32_t> source;       // [R] packed token of each head row, ascending
  std::vector<int32_t> row_offsets;  // [R + 1] edges of row r: [row_offsets[r], row_offsets[r+1])
  std::vector<int32_t> token;        // [X] child token id of each edge; ascending inside a row
};

// Where the scored tokens of the batch find their numbers: sample by sample in the batch's order,
// each sample's in order. [U]
struct LogicalTokens {
  std::vector<int32_t> block;     // [U] block of the source
  std::vector<int32_t> edge;      // [U] edge in that block: its log-probability
  std::vector<int32_t> row;       // [U] head row in that block: its entropy
  std::vector<int32_t> position;  // [U] index of the token in its sample
  std::vector<int32_t> offsets;   // [S + 1] tokens of sample s: [offsets[s], offsets[s + 1])
};

enum class CarryPolicy : uint8_t { kRetain, kRecompute };

// The first `count` offered tokens of an earlier block.
struct Carried {
  int32_t block = 0;
  int32_t count = 0;
  friend bool operator==(const Carried&, const Carried&) = default;
};

struct Block {
  Trie trie;                // carried path, then own tokens; par, tout, segments are local, dep
                            // and pos those of the whole path
  int32_t num_carried = 0;  // tokens [0, num_carried) of `trie` are computed elsewhere
  std::vector<Carried> carried;  // where their K and V come from, root first; counts add up
  std::vector<int32_t> offered;  // own tokens (in `trie`, ascending, one path) that later blocks
                                 // attend to; empty: closed
  CarryPolicy policy = CarryPolicy::kRetain;  // of an open block
  int32_t close = 0;  // last block that holds descendants of this one's tokens (or itself)
  Edges edges;        // rows of own sources, in tokens of `trie`
  std::vector<int32_t> samples;  // indices into the batch of the samples whose last token lies
                                 // here, in the order of trie.sample_end: their loss is due

  int32_t num_own() const { return trie.num_tokens() - num_carried; }
};

// kLoss(b): the losses of b.samples are due; all their edges have run. kRecompute(b): run the
// forward of b again and keep its activations; stands right in front of kBackward(b).
enum class Action : uint8_t { kForward, kLoss, kRecompute, kBackward };

struct Entry {
  Action action = Action::kForward;
  int32_t block = 0;  // or round: Plan::blocks_per_round
  friend bool operator==(const Entry&, const Entry&) = default;
};

// How the gradient gets across a cut: by the cost model, or one way only (sharing.carry).
enum class Carry : uint8_t { kAuto, kRetain, kRecompute, kReplay };

struct PlanOptions {
  BuildOptions build;
  // Tokens whose activations are alive at one time: the block that runs, replayed copies included,
  // and the retained open blocks above it. 0 = no limit.
  int64_t max_tokens_per_block = 0;
  int64_t max_samples_per_block = 0;  // samples that end in one block; 0 = no limit
  int64_t max_path_tokens = 0;        // longer samples are refused; 0 = no limit
  Carry carry = Carry::kAuto;
  // A top-level tree whose sharing saves less than this part of its cost is taken apart into its
  // samples; 0 keeps all that agrees.
  double unshare_margin = 0.0;
  bool for_backward = true;  // false: scoring; forward and loss entries only, nothing is retained
  CostModel cost;
};

struct Plan {
  std::vector<Block> blocks;
  std::vector<Entry> entries;    // with no cut: {forward 0, loss 0, backward 0}
  int64_t blocks_per_round = 1;  // n > 1: an entry is that of the blocks [n i, n (i + 1)), which n
                                 // ranks run at one time (trie/context_plan.h)
  LogicalTokens logical;
  int64_t num_logical = 0;     // T0 of the batch
  int64_t num_unique = 0;      // T1 of the batch's trie
  int64_t num_computed = 0;    // own tokens of all blocks: T1 and replayed copies
  int64_t num_recomputed = 0;  // tokens that run forward twice
  int64_t num_pairs = 0;       // query-key pairs of the computed tokens
  int64_t num_carried = 0;     // carried tokens, summed over blocks
  double modelled_seconds = 0.0;
  std::vector<std::string> warnings;
};

// Cuts the batch into blocks under all limits at the least modelled cost: for a pass with gradients
// blocks are all open or all closed (detail/cutter.h), else any run of packed tokens
// (detail/forward_cuts.h). A path longer than the budget is cut too. Where the limits leave no
// other way, options.carry and max_samples_per_block give in and a warning says so. Deterministic
// and independent of sample order. Throws [plan] on negative limits and on a sample longer than
// max_path_tokens, [trie] as build. About linear in the tokens.
Plan plan(const std::vector<Sample>& samples, const PlanOptions& options);

// The plan whose blocks end in front of the given tokens of the batch's packed trie (ascending,
// inside (0, T)), all open blocks under one policy: for tests and for looking at one cut. Throws
// [plan] on other positions.
Plan plan_with_cuts(const std::vector<Sample>& samples,
                    const std::vector<int32_t>& cuts,
                    CarryPolicy policy,
                    const PlanOptions& options = {});

Counts counts_of(const Plan& plan);

// Edges of a trie whose samples are `samples` (same order as trie.sample_end), and, if asked for,
// the way back to them; all tokens stand in block 0.
Edges edges_of(const Trie& trie,
               const std::vector<Sample>& samples,
               LogicalTokens* logical = nullptr);

}  // namespace banyan::trie
