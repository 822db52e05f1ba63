#include "banyan/trie/detail/state_table.h"

#include <algorithm>
#include <tuple>

#include "banyan/core/error.h"

namespace banyan::trie::detail {
namespace {

// Distinct amounts of retained tokens kept per node and depth.
constexpr size_t kMaxAmounts = 12;

auto key(const CutState& s) { return std::make_tuple(s.depth, s.retained, s.first); }

}  // namespace

void StateTable::settle(int32_t v, int32_t depth) {
  auto& wanted = requests_[v];
  std::sort(wanted.begin(), wanted.end(), [](const CutState& a, const CutState& b) {
    return key(a) < key(b);
  });
  const auto equal = [](const CutState& a, const CutState& b) { return key(a) == key(b); };
  wanted.erase(std::unique(wanted.begin(), wanted.end(), equal), wanted.end());
  auto& states = states_[v];
  while (!states.empty() && states.back().state.depth > depth) states.pop_back();
  for (size_t begin = 0; begin < wanted.size();) {
    size_t end = begin;
    std::vector<int64_t> amounts;
    for (; end < wanted.size() && wanted[end].depth == wanted[begin].depth; ++end) {
      const int64_t amount = wanted[end].retained;
      if (amounts.empty() || amounts.back() != amount) amounts.push_back(amount);
    }
    if (wanted[begin].depth > depth) group(v, begin, end, amounts);
    begin = end;
  }
}

// Appends the states of requests [begin, end) of node v, all of one depth.
void StateTable::group(int32_t v, size_t begin, size_t end, const std::vector<int64_t>& amounts) {
  const auto& wanted = requests_[v];
  const size_t count = std::min(amounts.size(), kMaxAmounts);
  for (size_t i = 1; i <= count; ++i) {
    const int64_t amount = amounts[amounts.size() * i / count - 1];
    Priced& priced = states_[v].emplace_back();
    priced.state = {v, wanted[begin].depth, amount, wanted[begin].first};
    for (; begin < end && wanted[begin].retained <= amount; ++begin) {
      priced.asked.push_back({wanted[begin].first, {}});
      priced.state.first = std::min(priced.state.first, wanted[begin].first);
    }
    auto& asked = priced.asked;
    std::sort(asked.begin(), asked.end(), [](const Asked& a, const Asked& b) {
      return a.first < b.first;
    });
    const auto equal = [](const Asked& a, const Asked& b) { return a.first == b.first; };
    asked.erase(std::unique(asked.begin(), asked.end(), equal), asked.end());
  }
}

const Priced& StateTable::at(const CutState& wanted) const {
  const auto& states = states_[wanted.node];
  const auto found = std::lower_bound(
      states.begin(), states.end(), wanted, [](const Priced& a, const CutState& b) {
        return std::make_pair(a.state.depth, a.state.retained) <
               std::make_pair(b.depth, b.retained);
      });
  BANYAN_ASSERT(found != states.end() && found->state.depth == wanted.depth,
                "cut: a state that nobody asked for");
  return *found;
}

const Asked& StateTable::answer(const CutState& wanted) const {
  const auto& asked = at(wanted).asked;
  const auto found =
      std::lower_bound(asked.begin(), asked.end(), wanted.first, [](const Asked& a, int32_t first) {
        return a.first < first;
      });
  BANYAN_ASSERT(found != asked.end() && found->first == wanted.first,
                "cut: a sample nobody asked for");
  return *found;
}

}  // namespace banyan::trie::detail
