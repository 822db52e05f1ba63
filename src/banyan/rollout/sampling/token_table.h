// Structured output: a finite automaton over tokens, compiled by the shell from a JSON schema, a
// regular expression or a list of choices. In a state only the tokens with a transition may be
// drawn; a final state also allows EOS. Immutable, shared by the responses of a request.
// Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace banyan::rollout {

class TokenTable {
 public:
  // Compressed rows: state s has tokens[offsets[s] .. offsets[s + 1]) ascending, with targets
  // alike. State 0 is the start. Throws [token_table] for offsets, tokens or targets out of range,
  // or a state that neither ends nor leads on.
  TokenTable(std::vector<int64_t> offsets,
             std::vector<int32_t> tokens,
             std::vector<int32_t> targets,
             std::vector<uint8_t> is_final);

  int32_t num_states() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  int32_t start() const { return 0; }
  bool is_final(int32_t state) const { return is_final_[state] != 0; }
  // Tokens that may follow, ascending.
  const int32_t* begin(int32_t state) const { return tokens_.data() + offsets_[state]; }
  const int32_t* end(int32_t state) const { return tokens_.data() + offsets_[state + 1]; }
  // The largest token id; -1 if there is none.
  int32_t max_token() const { return max_token_; }
  int64_t num_bytes() const {
    return static_cast<int64_t>(offsets_.size() * 8 + tokens_.size() * 8 + is_final_.size());
  }
  // The state after `token`; -1 if it may not follow. O(log tokens).
  int32_t next(int32_t state, int32_t token) const;

 private:
  std::vector<int64_t> offsets_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> targets_;
  std::vector<uint8_t> is_final_;
  int32_t max_token_ = -1;
};

}  // namespace banyan::rollout
