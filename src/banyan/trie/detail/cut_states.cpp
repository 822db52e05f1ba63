#include "banyan/trie/detail/cut_states.h"

#include <algorithm>

namespace banyan::trie::detail {

Prices::Prices(const CostModel& model, const ForkTree& tree)
    : tree_(tree),
      block_(std::max(model.per_block, 1e-3 * model.per_token)),  // of equal plans the coarser
      carry_(model.per_carry_byte * model.bytes_per_carried_token),
      token_(model.per_token),
      pair_(model.per_pair),
      row_(model.per_head_row),
      recompute_(model.per_recomputed_token),
      penalty_(block_ + carry_ + token_ + recompute_) {
  double all = 1.0;
  for (int32_t i = 0; i < tree.num_samples(); ++i) {
    const int64_t length = tree.length(i);
    all += block(length) + copy(i, 0, length) + recompute(length);
  }
  penalty_ += 16.0 * all;
}

double Prices::copy(int32_t i, int64_t from, int64_t to) const {
  if (to <= from) return 0.0;
  const auto pairs = static_cast<double>(to * (to + 1) - from * (from + 1)) / 2.0;
  return token_ * static_cast<double>(to - from) + pair_ * pairs +
         row_ * static_cast<double>(tree_.scored(i, from, to));
}

}  // namespace banyan::trie::detail
