// Tokens in the order of their bytes share beginnings, so each state is walked once along every
// beginning; a beginning that leads nowhere ends the walk of all tokens that have it.
#include "banyan/rollout/grammar/token_walk.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::rollout::grammar {
namespace {

constexpr int64_t kBytesPerTransition = 8;

using Row = std::vector<std::pair<int32_t, int32_t>>;  // token, state

struct Token {
  std::string_view bytes;
  int32_t id = 0;
  size_t shared = 0;  // bytes in common with the token before
};

std::vector<Token> sorted_tokens(const std::vector<std::string>& token_bytes) {
  std::vector<Token> tokens;
  for (size_t id = 0; id < token_bytes.size(); ++id) {
    if (!token_bytes[id].empty()) tokens.push_back({token_bytes[id], static_cast<int32_t>(id)});
  }
  std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.id < b.id;
  });
  for (size_t i = 1; i < tokens.size(); ++i) {
    const std::string_view a = tokens[i - 1].bytes, b = tokens[i].bytes;
    const auto ends = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    tokens[i].shared = static_cast<size_t>(ends.first - a.begin());
  }
  return tokens;
}

class Walk {
 public:
  Walk(const ByteAutomaton& automaton, const std::vector<std::string>& token_bytes)
      : automaton_(automaton), tokens_(sorted_tokens(token_bytes)) {
    for (const Token& token : tokens_) path_.resize(std::max(path_.size(), token.bytes.size() + 1));
    for (size_t i = 0, byte = 0; byte <= 256; ++byte) {
      while (i < tokens_.size() && static_cast<uint8_t>(tokens_[i].bytes[0]) < byte) ++i;
      begin_[byte] = i;
    }
  }

  // Tokens that may follow a state, ascending.
  Row row(int32_t state) {
    Row out;
    for (int32_t byte = 0; byte < 256; ++byte) {
      if (automaton_.after(state, static_cast<uint8_t>(byte)) >= 0) {
        walk(state, begin_[byte], begin_[byte + 1], out);
      }
    }
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  void walk(int32_t state, size_t begin, size_t end, Row& out) {
    path_[0] = state;
    size_t walked = 0;  // bytes of the token before that led somewhere
    for (size_t i = begin; i < end; ++i) {
      const std::string_view bytes = tokens_[i].bytes;
      const size_t shared = i == begin ? 0 : tokens_[i].shared;
      if (shared > walked) continue;
      for (walked = shared; walked < bytes.size(); ++walked) {
        path_[walked + 1] = automaton_.after(path_[walked], static_cast<uint8_t>(bytes[walked]));
        if (path_[walked + 1] < 0) break;
      }
      if (walked == bytes.size()) out.emplace_back(tokens_[i].id, path_[walked]);
    }
  }

  const ByteAutomaton& automaton_;
  std::vector<Token> tokens_;
  std::array<size_t, 257> begin_{};  // by first byte
  std::vector<int32_t> path_;        // state after so many bytes
};

// States, numbered as they are reached, from which an end can be reached.
std::vector<uint8_t> leads_to_end(const std::vector<Row>& rows,
                                  const std::vector<uint8_t>& is_final) {
  std::vector<std::vector<int32_t>> before(rows.size());
  for (size_t s = 0; s < rows.size(); ++s) {
    int32_t last = -1;
    for (const auto& [token, target] : rows[s]) {
      if (target != last) before[target].push_back(static_cast<int32_t>(s));
      last = target;
    }
  }
  std::vector<uint8_t> found(rows.size(), 0);
  std::vector<int32_t> open;
  const auto mark = [&](int32_t s) {
    if (std::exchange(found[s], 1) == 0) open.push_back(s);
  };
  for (size_t s = 0; s < rows.size(); ++s) {
    if (is_final[s] != 0) mark(static_cast<int32_t>(s));
  }
  while (!open.empty()) {
    const int32_t s = open.back();
    open.pop_back();
    for (const int32_t source : before[s]) mark(source);
  }
  return found;
}

}  // namespace

std::optional<TokenTable> walk_tokens(const ByteAutomaton& automaton,
                                      const std::vector<std::string>& token_bytes,
                                      int64_t max_bytes) {
  Walk walk(automaton, token_bytes);
  std::vector<Row> rows;
  std::vector<uint8_t> is_final;
  std::vector<int32_t> states = {0};  // of the automaton, as they are reached
  std::vector<int32_t> number(static_cast<size_t>(automaton.num_states()), -1);
  number[0] = 0;
  int64_t count = 0;
  for (size_t s = 0; s < states.size(); ++s) {
    Row row = walk.row(states[s]);
    count += static_cast<int64_t>(row.size());
    if (count * kBytesPerTransition > max_bytes) return std::nullopt;
    for (auto& [token, target] : row) {
      if (number[target] < 0) {
        number[target] = static_cast<int32_t>(states.size());
        states.push_back(target);
      }
      target = number[target];
    }
    rows.push_back(std::move(row));
    is_final.push_back(automaton.is_final[states[s]]);
  }
  const std::vector<uint8_t> ends = leads_to_end(rows, is_final);
  BANYAN_CHECK(ends[0] != 0, "[grammar] wanted a text that the model's tokens can write, got none");
  std::vector<int32_t> kept(rows.size(), -1);
  int32_t num_kept = 0;
  for (size_t s = 0; s < rows.size(); ++s) kept[s] = ends[s] != 0 ? num_kept++ : -1;
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> tokens, targets;
  std::vector<uint8_t> finals;
  for (size_t s = 0; s < rows.size(); ++s) {
    if (kept[s] < 0) continue;
    for (const auto& [token, target] : rows[s]) {
      if (kept[target] < 0) continue;
      tokens.push_back(token);
      targets.push_back(kept[target]);
    }
    rows[s] = Row();
    offsets.push_back(static_cast<int64_t>(tokens.size()));
    finals.push_back(is_final[s]);
  }
  return TokenTable(std::move(offsets), std::move(tokens), std::move(targets), std::move(finals));
}

}  // namespace banyan::rollout::grammar
