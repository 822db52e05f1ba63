#include "banyan/parallel/lockstep.h"

#include "banyan/core/error.h"
#include "banyan/parallel/pass_order.h"

namespace banyan::parallel {

using trie::Action;
using trie::Entry;

std::string passes_of(const std::vector<Entry>& entries) {
  std::string passes;
  bool again = false;
  for (const Entry& entry : entries) {
    BANYAN_ASSERT(!again || entry.action == Action::kBackward,
                  "a recompute that does not stand in front of its backward");
    if (entry.action == Action::kForward) passes += 'F';
    if (entry.action == Action::kBackward) passes += again ? 'R' : 'B';
    again = entry.action == Action::kRecompute;
  }
  return passes;
}

std::vector<Entry> padded(const std::vector<Entry>& entries, const std::string& order) {
  std::vector<Entry> out;
  size_t next = 0;
  const auto is_next = [&](Action action) {
    return next < entries.size() && entries[next].action == action;
  };
  const auto take = [&](Action action) {
    out.push_back(is_next(action) ? entries[next++] : Entry{action, kIdle});
  };
  for (const char pass : order) {
    while (is_next(Action::kLoss)) out.push_back(entries[next++]);
    if (pass == 'F') {
      take(Action::kForward);
      continue;
    }
    if (pass == 'R') take(Action::kRecompute);
    take(Action::kBackward);
  }
  while (is_next(Action::kLoss)) out.push_back(entries[next++]);
  BANYAN_ASSERT(next == entries.size(), "a pass that was not announced: ", order);
  return out;
}

std::vector<Entry> in_lockstep(const std::vector<Entry>& entries, Collectives& ranks) {
  return padded(entries, common_order(ranks.all_gather_bytes(passes_of(entries))));
}

}  // namespace banyan::parallel
