// Who starts: groups, and children of groups whose prompt is computed, while
//   sum over running of E[left] + uncached prompt + n * E[out] + tail copies <= free + evictable
// (rollout specification, section 4). In pages; E is schedule/length_estimate.h.
#include <algorithm>
#include <cmath>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {
namespace {

// Waiting groups looked at behind a head that does not fit.
constexpr int32_t kLookAhead = 64;

}  // namespace

// Pages after the trunk's whole ones that a child is expected to end with.
int32_t Scheduler::expected_pages(const Group& group, const Sequence& sequence) const {
  const int32_t max_new = group.request.max_new;
  if (max_new == 0) return 0;
  const int32_t drawn = static_cast<int32_t>(sequence.response.size());
  const int32_t tokens =
      group.request.ignore_eos ? max_new : lengths_.expected(group.source, max_new, drawn);
  return pages_for(int64_t{group.prompt_length()} + tokens - 1) - group.num_trunk_pages();
}

Scheduler::Room Scheduler::room() const {
  Room room;
  room.seats = options_.max_num_seqs - num_running_;
  room.active = num_running_ > 0;
  room.pages = int64_t{pool_->num_free()} + tree_->num_cached();
  room.pages -= static_cast<int64_t>(std::ceil(options_.watermark * pool_->num_pages()));
  for (const Group* group : started_) {
    for (const Sequence& sequence : group->sequences) {
      if (sequence.state != SequenceState::kRunning) continue;
      const int64_t own = static_cast<int64_t>(sequence.table.size()) - group->num_trunk_pages();
      room.pages -= std::max<int64_t>(0, expected_pages(*group, sequence) - own);
    }
  }
  return room;
}

void Scheduler::admit(Pass& pass) {
  if (options_.max_num_seqs <= num_running_ || num_running_ == num_unfinished_) return;
  Room room = this->room();
  // By index: a group's trunk may take the pages of juniors, but never their places in the list.
  for (size_t i = 0; i < started_.size() && room.seats > 0; ++i) {
    Group& group = *started_[i];
    if (group.num_in(SequenceState::kWaiting) == 0) continue;
    if (!admit_group(group, room, pass)) return;
  }
  admit_waiting(room, pass);
}

void Scheduler::admit_waiting(Room& room, Pass& pass) {
  if (room.seats <= 0 || queue_.size() == 0) return;
  if (closed_ && options_.policy == SchedulingPolicy::kGroup &&
      sorted_revision_ != lengths_.revision()) {
    queue_.sort_longest_first([&](const Group& group) {
      return group.request.ignore_eos
                 ? group.request.max_new
                 : lengths_.expected(group.source, group.request.max_new, /*drawn=*/0);
    });
    sorted_revision_ = lengths_.revision();
  }
  int32_t place = 0;
  while (place < std::min(queue_.size(), kLookAhead) && room.seats > 0) {
    Group& group = at(queue_.groups()[place]->id);
    if (admit_group(group, room, pass)) continue;  // it has left the queue
    if (place == 0 && blocked_arrival_ != group.arrival) {
      blocked_arrival_ = group.arrival;
      blocked_since_ = now();
    }
    // The head has waited long enough: nobody passes it any more.
    if (options_.policy != SchedulingPolicy::kGroup ||
        now() - blocked_since_ >= options_.starve_seconds) {
      return;
    }
    ++place;
  }
}

// From the queue to the started groups.
void Scheduler::enter(Group& group) {
  if (group.seniority >= 0) return;
  queue_.erase(group);
  group.seniority = num_entered_++;
  if (group.unit) {
    std::erase(group.unit->queued, &group);
    if (group.unit->seniority < 0) group.unit->seniority = group.seniority;
  }
  const auto senior = [&](const Group* a, const Group* b) {
    if (options_.policy == SchedulingPolicy::kPriority &&
        a->request.priority != b->request.priority) {
      return a->request.priority < b->request.priority;
    }
    return std::pair(a->lead(), a->seniority) < std::pair(b->lead(), b->seniority);
  };
  started_.insert(std::upper_bound(started_.begin(), started_.end(), &group, senior), &group);
  ranks_changed_ = true;
}

// Children that start now, or once the trunk is there, and the pages kept for them: for all that
// wait if groups go as a whole and this one does not fill half the pool, else for as many as fit,
// but at least one.
Scheduler::Start Scheduler::children_to_start(const Group& group,
                                              int64_t trunk_cost,
                                              const Room& room) const {
  Start whole;
  Start fitting;
  int32_t waiting = 0;
  for (const Sequence& sequence : group.sequences) {
    if (sequence.state != SequenceState::kWaiting || group.request.max_new == 0) continue;
    if (++waiting > options_.max_num_seqs) break;
    const int64_t pages = expected_pages(group, sequence);
    whole.pages += pages;
    if (whole.seats < room.seats) ++whole.seats;
    const bool fits = trunk_cost + fitting.pages + pages <= room.pages;
    if (fitting.seats == waiting - 1 && fitting.seats < room.seats && (fits || waiting == 1)) {
      ++fitting.seats;
      fitting.pages += pages;
    }
  }
  const bool as_a_whole =
      options_.policy == SchedulingPolicy::kGroup && 2 * whole.pages <= pool_->num_pages();
  return as_a_whole ? whole : fitting;
}

// With `pages` for itself: not all of its unit that wait fit beside it, though they would fit half
// the pool.
bool Scheduler::waits_for_unit(const Group& group, int64_t pages, const Room& room) const {
  if (!group.unit || group.seniority >= 0 || group.unit->queued.size() < 2) return false;
  int64_t total = pages;
  for (const Group* other : group.unit->queued) {
    if (other == &group) continue;
    const int64_t trunk = tree_->cost_of_hold(other->path, other->num_held);
    total += trunk + children_to_start(*other, trunk, room).pages;
  }
  return total > room.pages && 2 * total <= pool_->num_pages();
}

// False: it does not fit, so nobody after it may start either (but see admit_waiting).
bool Scheduler::admit_group(Group& group, Room& room, Pass& pass) {
  if (group.num_held == 0 && is_stale(group) && group.num_in(SequenceState::kRunning) == 0) {
    insert_again(group);
  }
  const int64_t trunk_cost =
      group.holds_trunk() ? 0 : tree_->cost_of_hold(group.path, group.num_held);
  const Start start = children_to_start(group, trunk_cost, room);
  if (!group.holds_trunk()) {
    const int64_t pages = trunk_cost + start.pages;
    if (room.active && (pages > room.pages || waits_for_unit(group, pages, room))) return false;
    while (!hold_trunk(group, pass)) {
      if (room.active || !reclaim(group, kTrunk, pass)) return false;
    }
    room.pages -= trunk_cost;
  }
  enter(group);
  if (!group.drawn || !trunk_ready(group)) {
    room.pages -= start.pages;
    room.seats -= start.seats;
    room.active = true;
    return true;
  }
  return admit_children(group, room, pass);
}

bool Scheduler::admit_children(Group& group, Room& room, Pass& pass) {
  for (int32_t child = 0; child < group.size() && room.seats > 0; ++child) {
    const Sequence& sequence = group.sequences[child];
    if (sequence.state != SequenceState::kWaiting || group.request.max_new == 0) continue;
    const int64_t cost = expected_pages(group, sequence);
    if (room.active && cost > room.pages) return false;
    if (!start_child(group, child, pass)) return false;
    room.pages -= cost;
    --room.seats;
    room.active = true;
  }
  return true;
}

// Pages of an earlier run that the tree still has. The last known position is left to compute.
void Scheduler::resume_pages(Group& group, Sequence& sequence) {
  const int32_t first = group.num_trunk_pages() * kPageTokens;
  const int32_t count = group.known(sequence) - 1 - first;
  if (!shares(group) || count < kPageTokens) return;
  tokens_.clear();
  for (int32_t i = 0; i < count; ++i) tokens_.push_back(group.token_at(sequence, first + i));
  sequence.path = tree_->hold_match(node_above(group, sequence), tokens_.data(), count);
  for (const int32_t node : sequence.path) sequence.table.push_back(tree_->node(node).page);
}

// The pages that are in host memory and not in the tree. False: there is no room for them.
bool Scheduler::restore(Group& group, int32_t child, Pass& pass) {
  Sequence& sequence = group.sequences[child];
  const size_t skipped = sequence.path.size();
  if (skipped < sequence.host.size()) {
    const int32_t count = static_cast<int32_t>(sequence.host.size() - skipped);
    if (!find_pages(group, child, count, pass)) return false;
    for (size_t i = skipped; i < sequence.host.size(); ++i) {
      sequence.table.push_back(pool_->take());
      pass.copies.push_back({.from = sequence.host[i],
                             .to = sequence.table.back(),
                             .kind = PageCopy::Kind::kRestore});
    }
    counters_.restored_pages += count;
  }
  const int32_t computed = sequence.computed;
  release_host(sequence);
  const int32_t matched = static_cast<int32_t>(sequence.path.size()) + group.num_trunk_pages();
  sequence.computed = std::max(computed, matched * kPageTokens);
  return true;
}

bool Scheduler::start_child(Group& group, int32_t child, Pass& pass) {
  Sequence& sequence = group.sequences[child];
  const int32_t trunk = group.num_trunk_pages();
  const bool last = group.num_in(SequenceState::kWaiting) == 1;
  sequence.state = SequenceState::kRunning;
  ++num_running_;
  sequence.table.assign(group.table.begin(), group.table.begin() + trunk);
  resume_pages(group, sequence);
  bool fits = true;
  if (!sequence.host.empty()) {
    fits = restore(group, child, pass);
  } else if (!sequence.path.empty()) {
    sequence.computed = static_cast<int32_t>(sequence.table.size()) * kPageTokens;
  } else {
    sequence.computed = group.prompt_length();
    if (group.prompt_length() % kPageTokens != 0) {
      const PrefixTree::Node& tail = tree_->node(group.path.back());
      sequence.table.push_back(tail.page);
      pool_->share(tail.page);
      // The last child to start writes in the tail itself, if nobody else wants it.
      if (last && tail.num_users == 1 && pool_->holders(tail.page) == 3) {
        tree_->forget_tail(group.path);
        --group.num_held;
        group.table.pop_back();
      }
    }
  }
  if (fits && cover(group, child, pass)) return true;
  // Not a preemption: it had nothing yet.
  const int32_t computed = sequence.computed;
  const bool spilled = !sequence.host.empty();
  stop_running(group, sequence);
  --sequence.num_retractions;
  if (spilled) sequence.computed = computed;
  return false;
}

}  // namespace banyan::rollout
