#include "banyan/rollout/grammar/automaton.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace banyan::rollout::grammar {
namespace {

// Stacks of nodes, each held once: a stack is its top and the stack below. Stack 0 is empty.
class Stacks {
 public:
  struct Entry {
    int32_t node = -1;   // to go back to
    int32_t below = -1;  // stack
    int32_t depth = 0;   // rules inside themselves
  };

  int32_t size() const { return static_cast<int32_t>(entries_.size()); }
  const Entry& operator[](int32_t stack) const { return entries_[stack]; }

  int32_t push(int32_t stack, int32_t node, bool goes_deeper) {
    const uint64_t key = static_cast<uint64_t>(stack) << 32 | static_cast<uint32_t>(node);
    const auto [found, is_new] = ids_.emplace(key, static_cast<int32_t>(entries_.size()));
    if (is_new) entries_.push_back({node, stack, entries_[stack].depth + (goes_deeper ? 1 : 0)});
    return found->second;
  }

 private:
  std::vector<Entry> entries_{Entry{}};
  std::unordered_map<uint64_t, int32_t> ids_;
};

using Place = std::pair<int32_t, int32_t>;  // node, stack
using Places = std::vector<Place>;

struct PlaceHash {
  size_t operator()(const Places& places) const {
    uint64_t hash = 1469598103934665603ull;
    for (const auto& [node, stack] : places) {
      hash = (hash ^ static_cast<uint32_t>(node)) * 1099511628211ull;
      hash = (hash ^ static_cast<uint32_t>(stack)) * 1099511628211ull;
    }
    return hash;
  }
};

class Expansion {
 public:
  Expansion(const RuleAutomata& rules, int32_t depth, const AutomatonLimits& limits)
      : rules_(rules), depth_(depth), limits_(limits) {
    out_.class_of = rules.class_of;
    out_.num_classes = rules.num_classes;
  }

  std::optional<ByteAutomaton> run() {
    state_of({{rules_.begin[rules_.root], 0}});
    for (size_t state = 0; state < sets_.size(); ++state) {
      const Places set = sets_[state];  // sets_ grows
      for (int32_t c = 0; c < out_.num_classes; ++c) {
        Places targets;
        for (const auto& [node, stack] : set) {
          const std::vector<int32_t>& next = rules_.nodes[node].next;
          if (next[c] >= 0) targets.emplace_back(next[c], stack);
        }
        looked_at_ += static_cast<int64_t>(set.size());
        const int32_t target = targets.empty() ? -1 : state_of(std::move(targets));
        if (is_beyond_limits()) return std::nullopt;
        out_.next[static_cast<int64_t>(state) * out_.num_classes + c] = target;
      }
    }
    return std::move(out_);
  }

 private:
  bool is_beyond_limits() const {
    return looked_at_ > limits_.max_places || out_.num_states() > limits_.max_states ||
           stacks_.size() > limits_.max_stacks;
  }

  // The state of these places and of all that follow from them without a byte.
  int32_t state_of(Places places) {
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
    Places kept;
    bool is_final = false;
    std::unordered_map<uint64_t, bool> seen;
    const auto add = [&](int32_t node, int32_t stack) {
      const uint64_t key = static_cast<uint64_t>(node) << 32 | static_cast<uint32_t>(stack);
      if (seen.emplace(key, true).second) places.emplace_back(node, stack);
    };
    for (const auto& [node, stack] : places) {
      seen.emplace(static_cast<uint64_t>(node) << 32 | static_cast<uint32_t>(stack), true);
    }
    while (!places.empty() && !is_beyond_limits()) {
      ++looked_at_;
      const auto [node, stack] = places.back();
      places.pop_back();
      const RuleNode& at = rules_.nodes[node];
      if (!at.next.empty()) kept.emplace_back(node, stack);
      if (at.is_final && stack == 0) is_final = true;
      if (at.is_final && stack != 0) add(stacks_[stack].node, stacks_[stack].below);
      for (const auto& [rule, behind] : at.calls) {
        if (rules_.nodes[behind].is_last()) {
          add(rules_.begin[rule], stack);
          continue;
        }
        const bool goes_deeper = rules_.circle[rule] == rules_.circle[at.rule];
        if (goes_deeper && stacks_[stack].depth >= depth_) continue;
        add(rules_.begin[rule], stacks_.push(stack, behind, goes_deeper));
      }
    }
    std::sort(kept.begin(), kept.end());
    if (is_final) kept.emplace_back(-1, -1);
    const auto [found, is_new] = ids_.emplace(kept, out_.num_states());
    if (is_new) {
      if (is_final) kept.pop_back();
      sets_.push_back(std::move(kept));
      out_.is_final.push_back(is_final ? 1 : 0);
      out_.next.resize(out_.next.size() + static_cast<size_t>(out_.num_classes), -1);
    }
    return found->second;
  }

  const RuleAutomata& rules_;
  const int32_t depth_;
  const AutomatonLimits limits_;
  Stacks stacks_;
  ByteAutomaton out_;
  std::unordered_map<Places, int32_t, PlaceHash> ids_;
  std::vector<Places> sets_;  // by state
  int64_t looked_at_ = 0;
};

}  // namespace

std::optional<ByteAutomaton> expand(const RuleAutomata& rules,
                                    int32_t depth,
                                    const AutomatonLimits& limits) {
  return Expansion(rules, depth, limits).run();
}

}  // namespace banyan::rollout::grammar
