// Limits, prices and states of the cutter (see cutter.h).
#pragma once

#include <cstdint>
#include <limits>

#include "banyan/trie/detail/fork_tree.h"
#include "banyan/trie/plan.h"

namespace banyan::trie::detail {

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;

struct Limits {
  explicit Limits(const PlanOptions& options)
      : tokens(options.max_tokens_per_block > 0 ? options.max_tokens_per_block : kNoLimit),
        samples(options.max_samples_per_block > 0 ? options.max_samples_per_block : kNoLimit) {}
  int64_t tokens;
  int64_t samples;
};

// Modelled cost of single decisions, forward and backward. Own tokens of the uncut trie cost the
// same under every plan and are left out.
class Prices {
 public:
  Prices(const CostModel& model, const ForkTree& tree);
  double block(int64_t carried) const { return block_ + carry_ * static_cast<double>(carried); }
  // Another copy of sample i's tokens at depths [from, to).
  double copy(int32_t i, int64_t from, int64_t to) const;
  double recompute(int64_t tokens) const { return recompute_ * static_cast<double>(tokens); }
  // More than any plan costs: for what must not happen unless nothing else is possible.
  double penalty() const { return penalty_; }

 private:
  const ForkTree& tree_;
  double block_, carry_, token_, pair_, row_, recompute_, penalty_;
};

// What a stretch of the plan costs, and the closed block that it ends with: samples after it may
// still join that one.
struct Stretch {
  double cost = 0.0;
  int32_t tail = -1;  // first sample of that block; -1: the stretch ends with an open block
  int32_t tail_depth = 0;
  int64_t tail_retained = 0;
};

// A node carried down to `depth`, with `retained` tokens alive meanwhile.
struct CutState {
  int32_t node = 0;
  int32_t depth = 0;
  int64_t retained = 0;
  int32_t first = 0;  // samples [first, last of `node`) are to be dealt with, or a later part
};

}  // namespace banyan::trie::detail
