#include "banyan/trie/cost_model.h"

namespace banyan::trie {

double CostModel::seconds(const Counts& counts) const {
  const auto times = [](double constant, int64_t count) {
    return constant * static_cast<double>(count);
  };
  return times(per_block, counts.blocks) + times(per_token, counts.tokens) +
         times(per_pair, counts.pairs) + times(per_head_row, counts.head_rows) +
         times(per_fork, counts.forks) +
         times(per_carry_byte * bytes_per_carried_token, counts.carried) +
         times(per_recomputed_token, counts.recomputed);
}

}  // namespace banyan::trie
