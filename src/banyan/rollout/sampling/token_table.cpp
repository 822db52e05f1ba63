#include "banyan/rollout/sampling/token_table.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::rollout {

TokenTable::TokenTable(std::vector<int64_t> offsets,
                       std::vector<int32_t> tokens,
                       std::vector<int32_t> targets,
                       std::vector<uint8_t> is_final)
    : offsets_(std::move(offsets)),
      tokens_(std::move(tokens)),
      targets_(std::move(targets)),
      is_final_(std::move(is_final)) {
  const int64_t count = static_cast<int64_t>(tokens_.size());
  const int64_t states = static_cast<int64_t>(is_final_.size());
  BANYAN_CHECK(states >= 1 && states <= (int64_t{1} << 30),
               "[token_table] is_final: wanted one entry per state, at least one state, got ",
               states);
  BANYAN_CHECK(static_cast<int64_t>(offsets_.size()) == states + 1 && offsets_.front() == 0 &&
                   offsets_.back() == count && std::is_sorted(offsets_.begin(), offsets_.end()),
               "[token_table] offsets: wanted ",
               states + 1,
               " ascending numbers from 0 to the ",
               count,
               " tokens, got ",
               offsets_.size());
  BANYAN_CHECK(targets_.size() == tokens_.size(),
               "[token_table] targets: wanted one per token (",
               count,
               "), got ",
               targets_.size());
  for (int64_t s = 0; s < states; ++s) {
    BANYAN_CHECK(is_final_[s] != 0 || offsets_[s] < offsets_[s + 1],
                 "[token_table] state ",
                 s,
                 ": wanted a state that ends or leads on, got neither");
    for (int64_t i = offsets_[s]; i < offsets_[s + 1]; ++i) {
      BANYAN_CHECK(tokens_[i] >= 0 && (i == offsets_[s] || tokens_[i - 1] < tokens_[i]),
                   "[token_table] state ",
                   s,
                   ": wanted ascending token ids >= 0, got ",
                   tokens_[i]);
      BANYAN_CHECK(targets_[i] >= 0 && targets_[i] < states,
                   "[token_table] state ",
                   s,
                   ": wanted targets in [0, ",
                   states,
                   "), got ",
                   targets_[i]);
      max_token_ = std::max(max_token_, tokens_[i]);
    }
  }
}

int32_t TokenTable::next(int32_t state, int32_t token) const {
  const int32_t* const found = std::lower_bound(begin(state), end(state), token);
  return found != end(state) && *found == token ? targets_[found - tokens_.data()] : -1;
}

}  // namespace banyan::rollout
