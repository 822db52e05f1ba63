#include "banyan/rollout/sampling/outlines_index.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "banyan/core/error.h"

namespace banyan::rollout {
namespace {

constexpr int64_t kBytesPerTransition = 8;

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  uint64_t next() {
    const uint64_t first = byte();
    if (first < 251) return first;
    BANYAN_CHECK(first <= 253, "[token_table] index: wanted a varint, got byte ", first);
    uint64_t value = 0;
    const int count = first == 251 ? 2 : first == 252 ? 4 : 8;
    for (int i = 0; i < count; ++i) value |= byte() << (8 * i);
    return value;
  }
  // A count of things that take at least one byte each.
  uint64_t count() {
    const uint64_t value = next();
    BANYAN_CHECK(value <= bytes_.size() - place_,
                 "[token_table] index: wanted ",
                 value,
                 " entries, got ",
                 bytes_.size() - place_,
                 " bytes");
    return value;
  }
  bool done() const { return place_ == bytes_.size(); }

 private:
  uint64_t byte() {
    BANYAN_CHECK(place_ < bytes_.size(), "[token_table] index: wanted more bytes, got its end");
    return static_cast<uint8_t>(bytes_[place_++]);
  }

  std::string_view bytes_;
  size_t place_ = 0;
};

struct Row {
  std::vector<std::pair<int32_t, uint64_t>> transitions;  // token, state
};

}  // namespace

TokenTable read_outlines_index(std::string_view bytes, int32_t end_token, int64_t max_bytes) {
  Reader reader(bytes);
  const uint64_t initial = reader.next();
  std::unordered_set<uint64_t> final_states;
  for (uint64_t left = reader.count(); left > 0; --left) final_states.insert(reader.next());
  std::unordered_map<uint64_t, Row> rows;
  int64_t total = 0;
  for (uint64_t left = reader.count(); left > 0; --left) {
    Row& row = rows[reader.next()];
    const uint64_t size = reader.count();
    total += static_cast<int64_t>(size);
    BANYAN_CHECK(total <= max_bytes / kBytesPerTransition,
                 "[token_table] wanted a table of at most ",
                 max_bytes >> 20,
                 " MB, got more than ",
                 total,
                 " transitions; use a pattern with fewer free texts or repeats");
    row.transitions.reserve(size);
    for (uint64_t i = 0; i < size; ++i) {
      const auto token = static_cast<int32_t>(reader.next());
      const uint64_t target = reader.next();
      if (token != end_token) row.transitions.emplace_back(token, target);
    }
    std::sort(row.transitions.begin(), row.transitions.end());
  }
  reader.next();
  reader.next();
  BANYAN_CHECK(reader.done(), "[token_table] index: wanted its end, got more bytes");

  std::unordered_map<uint64_t, int32_t> number = {{initial, 0}};
  std::vector<uint64_t> order = {initial};
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  std::vector<uint8_t> is_final;
  for (size_t s = 0; s < order.size(); ++s) {
    const uint64_t state = order[s];
    for (const auto& [token, target] : rows[state].transitions) {
      const auto [found, fresh] = number.emplace(target, static_cast<int32_t>(order.size()));
      if (fresh) order.push_back(target);
      tokens.push_back(token);
      targets.push_back(found->second);
    }
    rows.erase(state);
    offsets.push_back(static_cast<int64_t>(tokens.size()));
    is_final.push_back(final_states.count(state) > 0 ? 1 : 0);
  }
  return TokenTable(std::move(offsets), std::move(tokens), std::move(targets), std::move(is_final));
}

}  // namespace banyan::rollout
