#include "banyan/rollout/scheduler.h"

#include <algorithm>
#include <numeric>

#include "banyan/core/error.h"

namespace banyan::rollout {
namespace {

int32_t num_waiting(const Group& group) {
  return static_cast<int32_t>(
      std::count_if(group.sequences.begin(), group.sequences.end(), [](const Sequence& s) {
        return s.state == SequenceState::kWaiting;
      }));
}

}  // namespace

void Pass::clear() {
  copies.clear();
  runs.clear();
  decodes.clear();
  trunks.clear();
  num_tokens = 0;
  num_prompt_tokens = 0;
}

int32_t pages_of_one(int32_t prompt_length, int32_t max_new) {
  // The trunk with its tail, and the child's own pages; the last token drawn is never computed.
  return pages_for(prompt_length) + pages_for(int64_t{prompt_length} + max_new - 1) -
         prompt_length / kPageTokens;
}

Scheduler::Scheduler(const SchedulerOptions& options,
                     PagePool& pool,
                     PrefixTree& tree,
                     std::vector<Group>& groups)
    : options_(options), pool_(pool), tree_(tree), groups_(groups) {
  for (Group& group : groups_) {
    group.path = tree_.insert(group.prompt);
    num_unfinished_ += static_cast<int32_t>(group.sequences.size());
  }
  std::stable_sort(groups_.begin(), groups_.end(), [](const Group& a, const Group& b) {
    return a.path < b.path;
  });
  ends_.resize(tree_.num_nodes());
  for (size_t g = 0; g < groups_.size(); ++g) {
    ends_[groups_[g].path.back()].push_back(static_cast<int32_t>(g));
  }
}

void Scheduler::next_pass(Pass& pass) {
  pass.clear();
  grow_running(pass);
  admit(pass);
  plan_runs(pass);
  BANYAN_ASSERT(pass.num_tokens > 0, "scheduler: an empty pass with ", num_unfinished_, " to go");
}

void Scheduler::append(int32_t group, int32_t child, int32_t token, float logprob) {
  Sequence& sequence = groups_[group].sequences[child];
  sequence.response.push_back(token);
  sequence.logprobs.push_back(logprob);
}

void Scheduler::finish(int32_t group_index, int32_t child) {
  Group& group = groups_[group_index];
  Sequence& sequence = group.sequences[child];
  if (sequence.state == SequenceState::kRunning) --num_running_;
  for (const int32_t page : sequence.pages) pool_.release(page);
  sequence.pages.clear();
  sequence.state = SequenceState::kFinished;
  --num_unfinished_;
  if (++group.num_finished == static_cast<int32_t>(group.sequences.size())) {
    drop_trunk(group);
    tree_.leave(group.path);
  }
  const int32_t num_groups = static_cast<int32_t>(groups_.size());
  while (first_unfinished_ < num_groups && groups_[first_unfinished_].finished()) {
    ++first_unfinished_;
  }
}

void Scheduler::pages_of(const Run& run, std::vector<int32_t>& pages) const {
  const Group& group = groups_[run.group];
  const int32_t wanted = pages_for(run.first_position + run.num_tokens);
  pages.clear();
  const int32_t shared = run.child == kTrunk ? wanted : group.num_trunk_pages();
  for (int32_t i = 0; i < shared; ++i) pages.push_back(tree_.node(group.path[i]).page);
  if (run.child == kTrunk) return;
  const std::vector<int32_t>& own = group.sequences[run.child].pages;
  pages.insert(pages.end(), own.begin(), own.begin() + (wanted - shared));
}

bool Scheduler::trunk_ready(const Group& group) const {
  return group.num_held == static_cast<int32_t>(group.path.size()) &&
         tree_.computed(group.path) == group.prompt_length();
}

// Pages of its own that a child is expected to end with.
int32_t Scheduler::expected_pages(const Group& group, const Sequence& sequence) const {
  const int64_t drawn = static_cast<int64_t>(sequence.response.size());
  const int64_t guess = (int64_t{group.max_new} * options_.expected_percent + 99) / 100;
  const int64_t tokens =
      std::clamp<int64_t>(guess, std::min<int64_t>(drawn + 1, group.max_new), group.max_new);
  return pages_for(group.prompt_length() + tokens - 1) - group.num_trunk_pages();
}

// Gives a running child pages for every known position, its own copy of a shared tail included.
bool Scheduler::cover(int32_t group_index, int32_t child, Pass& pass) {
  const Group& group = groups_[group_index];
  Sequence& sequence = groups_[group_index].sequences[child];
  const auto find_page = [&] { return pool_.num_free() > 0 || reclaim(group_index, child); };
  if (!sequence.pages.empty() && pool_.holders(sequence.pages[0]) > 1) {
    if (!find_page()) return false;
    const int32_t copy = pool_.take();
    pass.copies.push_back({.from = sequence.pages[0], .to = copy});
    pool_.release(sequence.pages[0]);
    sequence.pages[0] = copy;
  }
  const int32_t wanted = pages_for(group.known(sequence)) - group.num_trunk_pages();
  while (static_cast<int32_t>(sequence.pages.size()) < wanted) {
    if (!find_page()) return false;
    sequence.pages.push_back(pool_.take());
  }
  return true;
}

void Scheduler::preempt(Sequence& sequence) {
  for (const int32_t page : sequence.pages) pool_.release(page);
  sequence.pages.clear();
  sequence.computed = 0;
  sequence.state = SequenceState::kWaiting;
  --num_running_;
  ++num_preemptions_;
}

void Scheduler::drop_trunk(Group& group) {
  tree_.drop(group.path, 0, group.num_held);
  group.num_held = 0;
}

// Frees at least one page for a child (or trunk) at the cost of the cache, then of what comes after
// it in priority; false if nothing is left to take.
bool Scheduler::reclaim(int32_t group_index, int32_t child) {
  if (tree_.evict_one()) return true;
  for (int32_t g = end_admitted_ - 1; g >= group_index; --g) {
    Group& group = groups_[g];
    if (g == group_index && child == kTrunk) return false;
    const int32_t last_kept = g == group_index ? child : -1;
    for (int32_t c = static_cast<int32_t>(group.sequences.size()) - 1; c > last_kept; --c) {
      if (group.sequences[c].state == SequenceState::kRunning) {
        preempt(group.sequences[c]);
        return true;
      }
    }
    if (g != group_index) {
      drop_trunk(group);
      if (tree_.evict_one()) return true;
    }
  }
  return false;
}

void Scheduler::grow_running(Pass& pass) {
  for (int32_t g = first_unfinished_; g < end_admitted_; ++g) {
    Group& group = groups_[g];
    for (size_t c = 0; c < group.sequences.size(); ++c) {
      Sequence& sequence = group.sequences[c];
      if (sequence.state != SequenceState::kRunning) continue;
      if (!cover(g, static_cast<int32_t>(c), pass)) preempt(sequence);
    }
  }
}

bool Scheduler::admit_child(int32_t group_index, int32_t child, Pass& pass) {
  Group& group = groups_[group_index];
  Sequence& sequence = group.sequences[child];
  sequence.state = SequenceState::kRunning;
  sequence.computed = group.prompt_length();
  ++num_running_;
  if (group.prompt_length() % kPageTokens != 0) {
    const PrefixTree::Node& tail = tree_.node(group.path.back());
    sequence.pages.push_back(tail.page);
    pool_.share(tail.page);
    // The last child to start writes in the tail itself, if no other prompt wants it.
    if (tail.num_users == 1 && num_waiting(group) == 0) {
      tree_.forget_tail(group.path);
      --group.num_held;
    }
  }
  if (cover(group_index, child, pass)) return true;
  preempt(sequence);
  return false;
}

void Scheduler::admit(Pass& pass) {
  int32_t slots = options_.max_num_seqs - num_running_;
  if (slots <= 0 || num_running_ == num_unfinished_) return;
  int64_t spare = available();  // pages not promised to anyone
  for (int32_t g = first_unfinished_; g < end_admitted_; ++g) {
    for (const Sequence& sequence : groups_[g].sequences) {
      if (sequence.state != SequenceState::kRunning) continue;
      spare -= expected_pages(groups_[g], sequence) - static_cast<int64_t>(sequence.pages.size());
    }
  }
  bool active = num_running_ > 0;  // something will free pages later, so waiting is safe
  const int32_t num_groups = static_cast<int32_t>(groups_.size());
  for (int32_t g = first_unfinished_; g < num_groups && slots > 0; ++g) {
    Group& group = groups_[g];
    if (num_waiting(group) == 0) continue;
    int32_t starting = 0;  // children that may start once the trunk is there, and their pages
    int64_t starting_pages = 0;
    for (const Sequence& sequence : group.sequences) {
      if (sequence.state != SequenceState::kWaiting || starting == slots) continue;
      ++starting;
      starting_pages += expected_pages(group, sequence);
    }
    if (group.num_held < static_cast<int32_t>(group.path.size())) {
      const int64_t cost = tree_.cost_of_hold(group.path, group.num_held);
      if (active && cost + starting_pages > spare) return;
      while (!tree_.hold(group.path, group.num_held)) {
        if (active || !reclaim(g, kTrunk)) return;
      }
      group.num_held = static_cast<int32_t>(group.path.size());
      end_admitted_ = std::max(end_admitted_, g + 1);
      spare -= cost;
    }
    if (!trunk_ready(group)) {
      spare -= starting_pages;
      slots -= starting;
      active = true;
      continue;
    }
    for (size_t c = 0; c < group.sequences.size() && slots > 0; ++c) {
      const Sequence& sequence = group.sequences[c];
      if (sequence.state != SequenceState::kWaiting) continue;
      const int64_t cost = expected_pages(group, sequence);
      if (active && cost > spare) return;
      if (!admit_child(g, static_cast<int32_t>(c), pass)) return;
      spare -= cost;
      --slots;
      active = true;
    }
  }
}

void Scheduler::plan_trunk(int32_t group_index, int32_t& budget, Pass& pass) {
  const Group& group = groups_[group_index];
  const int32_t first = tree_.computed(group.path);
  const int32_t left = group.prompt_length() - first;
  const int32_t count = std::min(left, budget);
  if (count == 0 || (count < left && !options_.chunked_prefill)) return;
  for (const int32_t index : group.path) {
    const PrefixTree::Node& node = tree_.node(index);
    if (node.end() <= first || node.end() > first + count) continue;
    for (const int32_t ending : ends_[index]) {
      if (groups_[ending].drawn || groups_[ending].finished()) continue;
      groups_[ending].drawn = true;
      pass.trunks.push_back(
          {.row = pass.num_tokens + node.end() - 1 - first, .group = ending, .child = kTrunk});
    }
  }
  pass.runs.push_back(
      {.group = group_index, .child = kTrunk, .first_position = first, .num_tokens = count});
  tree_.advance(group.path, first + count);
  pass.num_tokens += count;
  pass.num_prompt_tokens += count;
  budget -= count;
}

void Scheduler::plan_child(int32_t group_index, int32_t child, int32_t count, Pass& pass) {
  Sequence& sequence = groups_[group_index].sequences[child];
  pass.runs.push_back({.group = group_index,
                       .child = child,
                       .first_position = sequence.computed,
                       .num_tokens = count});
  sequence.computed += count;
  pass.num_tokens += count;
  if (sequence.computed == groups_[group_index].known(sequence)) {
    pass.decodes.push_back({.row = pass.num_tokens - 1, .group = group_index, .child = child});
  }
}

void Scheduler::plan_runs(Pass& pass) {
  int32_t decodes = 0;
  for (int32_t g = first_unfinished_; g < end_admitted_; ++g) {
    for (const Sequence& sequence : groups_[g].sequences) {
      decodes += sequence.state == SequenceState::kRunning &&
                 groups_[g].known(sequence) - sequence.computed == 1;
    }
  }
  decodes = std::min(decodes, options_.max_num_batched_tokens);
  int32_t budget = options_.max_num_batched_tokens - decodes;  // of prompts and longer runs
  for (int32_t g = first_unfinished_; g < end_admitted_; ++g) {
    Group& group = groups_[g];
    if (group.num_held == static_cast<int32_t>(group.path.size()) && !trunk_ready(group)) {
      plan_trunk(g, budget, pass);
    }
    for (size_t c = 0; c < group.sequences.size(); ++c) {
      const Sequence& sequence = group.sequences[c];
      if (sequence.state != SequenceState::kRunning) continue;
      const int32_t behind = group.known(sequence) - sequence.computed;
      int32_t& share = behind == 1 ? decodes : budget;
      const int32_t count = std::min(behind, share);
      if (count == 0) continue;
      plan_child(g, static_cast<int32_t>(c), count, pass);
      share -= count;
    }
  }
}

}  // namespace banyan::rollout
