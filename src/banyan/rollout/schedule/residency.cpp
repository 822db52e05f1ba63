// Who holds which pages: trunks of groups, pages of children, what is published, and who gives way
// when there are none left.
#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/rollout/schedule/scheduler.h"
#include "banyan/rollout/schedule/spill.h"

namespace banyan::rollout {

// Its pages may be matched by others, and it may match theirs.
bool Scheduler::shares(const Group& group) const {
  return options_.share_prefix && !group.tainted && !group.request.score_prompt;
}

// Its path is of an earlier generation of the tree.
bool Scheduler::is_stale(const Group& group) const {
  return group.tainted ||
         (shares(group) && tree_->node(group.path.front()).generation != tree_->generation());
}

bool Scheduler::trunk_ready(const Group& group) const {
  return group.holds_trunk() && tree_->computed(group.path) == group.prompt_length();
}

// The node that the next page of a child follows.
int32_t Scheduler::node_above(const Group& group, const Sequence& sequence) const {
  if (!sequence.path.empty()) return sequence.path.back();
  const int32_t trunk = group.num_trunk_pages();
  return trunk > 0 ? group.path[trunk - 1] : group.root;
}

std::span<const int32_t> Scheduler::pages_of(const Run& run) const {
  const Group& group = *groups_[run.group];
  const std::vector<int32_t>& table =
      run.child == kTrunk ? group.table : group.sequences[run.child].table;
  const size_t wanted = pages_for(run.first_position + run.num_tokens);
  BANYAN_ASSERT(wanted <= table.size(), "scheduler: a run beyond its pages");
  return {table.data(), wanted};
}

bool Scheduler::hold_trunk(Group& group, Pass& pass) {
  for (size_t i = group.num_held; i < group.path.size(); ++i) {
    undo_computed_.emplace_back(group.path[i], tree_->node(group.path[i]).computed);
  }
  if (!tree_->hold(group.path, group.num_held, pass.copies)) return false;
  for (size_t i = group.num_held; i < group.path.size(); ++i) {
    group.table.push_back(tree_->node(group.path[i]).page);
  }
  group.num_held = static_cast<int32_t>(group.path.size());
  if (!group.drawn) undrawn_[group.path.back()].push_back(group.id);
  return true;
}

void Scheduler::forget_undrawn(const Group& group) {
  if (group.drawn || !group.holds_trunk() || group.path.empty()) return;
  const auto entry = undrawn_.find(group.path.back());
  if (entry == undrawn_.end()) return;
  std::erase(entry->second, group.id);
  if (entry->second.empty()) undrawn_.erase(entry);
}

void Scheduler::drop_trunk(Group& group) {
  forget_undrawn(group);
  tree_->drop(group.path, 0, group.num_held);
  group.num_held = 0;
  group.table.clear();
}

// Makes the computed whole pages of a running child known to the tree, and at its end the computed
// part of the last one.
void Scheduler::publish(Group& group, Sequence& sequence, bool with_tail) {
  if (!shares(group)) return;
  for (;;) {
    const size_t next = group.num_trunk_pages() + sequence.path.size();
    const int32_t first = static_cast<int32_t>(next) * kPageTokens;
    const int32_t count = std::min(kPageTokens, sequence.computed - first);
    if (next >= sequence.table.size()) return;
    if (count < (with_tail ? PrefixTree::kMinCopiedTokens : kPageTokens)) return;
    tokens_.clear();
    for (int32_t i = 0; i < count; ++i) tokens_.push_back(group.token_at(sequence, first + i));
    const int32_t node =
        tree_->publish(node_above(group, sequence), tokens_.data(), count, sequence.table[next]);
    if (node < 0) return;
    sequence.path.push_back(node);
    sequence.table[next] = tree_->node(node).page;
  }
}

// Last page first, so that prefixes outlive suffixes.
void Scheduler::release_pages(const Group& group, Sequence& sequence) {
  const size_t first_private = group.num_trunk_pages() + sequence.path.size();
  while (sequence.table.size() > first_private) {
    pool_->release(sequence.table.back());
    sequence.table.pop_back();
  }
  tree_->drop(sequence.path, 0, static_cast<int32_t>(sequence.path.size()));
  sequence.path.clear();
  sequence.table.clear();
}

void Scheduler::release_host(Sequence& sequence) {
  for (const int32_t slot : sequence.host) host_.release(slot);
  if (!sequence.host.empty()) sequence.computed = 0;
  sequence.host.clear();
}

void Scheduler::stop_running(const Group& group, Sequence& sequence) {
  release_pages(group, sequence);
  sequence.state = SequenceState::kWaiting;
  sequence.computed = 0;
  ++sequence.num_retractions;
  --num_running_;
}

// Takes a running child's pages for want of pages. What follows the trunk goes to host memory where
// that is cheaper than to compute it again.
void Scheduler::preempt(Group& group, Sequence& sequence, Pass& pass) {
  const int32_t trunk = group.num_trunk_pages();
  const int32_t own = static_cast<int32_t>(sequence.table.size()) - trunk;
  const int32_t computed = sequence.computed;
  const int32_t tokens = computed - trunk * kPageTokens;
  const bool spills = own <= host_.num_free() && computed > group.prompt_length() &&
                      worth_spilling(spill_costs_, own, options_.page_bytes, tokens);
  std::vector<int32_t> slots;
  if (spills) {
    for (int32_t i = trunk; i < trunk + own; ++i) {
      slots.push_back(host_.take());
      pass.copies.push_back(
          {.from = sequence.table[i], .to = slots.back(), .kind = PageCopy::Kind::kSpill});
    }
    counters_.spilled_pages += own;
  }
  stop_running(group, sequence);
  if (spills) {
    sequence.host = std::move(slots);
    sequence.computed = computed;
  }
  ++counters_.preemptions;
  preempted_ = true;
  lengths_.on_preemption();
}

// Frees at least one page for a child (or trunk) at the cost of the cache, then of what is junior
// to it; false if nothing is left to take.
bool Scheduler::reclaim(const Group& group, int32_t child, Pass& pass) {
  if (tree_->evict_one()) return true;
  if (group.seniority < 0) return false;
  for (auto it = started_.rbegin(); it != started_.rend(); ++it) {
    Group& victim = **it;
    const bool own = &victim == &group;
    if (own && child == kTrunk) return false;
    for (;;) {
      Sequence* most = nullptr;  // of the running children, the one with most private pages
      for (int32_t c = own ? child + 1 : 0; c < victim.size(); ++c) {
        Sequence& sequence = victim.sequences[c];
        if (sequence.state != SequenceState::kRunning) continue;
        const auto private_pages = [](const Sequence& s) { return s.table.size() - s.path.size(); };
        if (!most || private_pages(sequence) >= private_pages(*most)) most = &sequence;
      }
      if (!most) break;
      preempt(victim, *most, pass);
      if (pool_->num_free() > 0 || tree_->evict_one()) return true;
    }
    if (own) return false;
    drop_trunk(victim);
    if (pool_->num_free() > 0 || tree_->evict_one()) return true;
  }
  return false;
}

bool Scheduler::find_pages(const Group& group, int32_t child, int32_t count, Pass& pass) {
  while (pool_->num_free() < count) {
    if (!reclaim(group, child, pass)) return false;
  }
  return true;
}

// Gives a running child pages for every known position, its own copy of a shared tail included.
bool Scheduler::cover(Group& group, int32_t child, Pass& pass) {
  Sequence& sequence = group.sequences[child];
  const size_t next = group.num_trunk_pages() + sequence.path.size();  // first private page
  if (next < sequence.table.size() && pool_->holders(sequence.table[next]) > 1) {
    if (!find_pages(group, child, 1, pass)) return false;
    const int32_t copy = pool_->take();
    pass.copies.push_back({.from = sequence.table[next], .to = copy});
    pool_->release(sequence.table[next]);
    sequence.table[next] = copy;
  }
  const size_t wanted = pages_for(group.known(sequence));
  while (sequence.table.size() < wanted) {
    if (!find_pages(group, child, 1, pass)) return false;
    sequence.table.push_back(pool_->take());
  }
  return true;
}

}  // namespace banyan::rollout
