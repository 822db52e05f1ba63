// Groups come and go, and what control does to all of them at once. Pages: residency.cpp; who
// starts: admission.cpp; what a pass computes: planning.cpp.
#include "banyan/rollout/schedule/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/rollout/request.h"

namespace banyan::rollout {
namespace {

double machine_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

SchedulerOptions with_clock(SchedulerOptions options) {
  if (!options.now) options.now = machine_seconds;
  return options;
}

}  // namespace

int32_t pages_of_one(int32_t prompt_length, int32_t max_new) {
  if (max_new == 0) return pages_for(prompt_length);
  // The trunk with its tail, and the child's own pages; the last token drawn is never computed.
  return pages_for(prompt_length) + pages_for(int64_t{prompt_length} + max_new - 1) -
         prompt_length / kPageTokens;
}

void check_fits(int32_t prompt_length, int32_t max_new, int32_t num_pages, int64_t page_bytes) {
  const int64_t needed = pages_of_one(prompt_length, max_new);
  if (num_pages == 0 || needed <= num_pages) return;
  const int64_t bytes = std::max<int64_t>(page_bytes, 1);
  const char* unit = page_bytes > 0 ? " bytes" : " pages";
  throw RequestError(
      400,
      "max_tokens",
      detail::concat("[rollout] kv pool: a prompt of ",
                     prompt_length,
                     " tokens with ",
                     max_new,
                     " new ones can never fit: wanted ",
                     needed * bytes,
                     unit,
                     ", got a pool of ",
                     num_pages * bytes,
                     unit,
                     "; raise kv_cache_memory_bytes (or gpu_memory_utilization) or lower the "
                     "number of new tokens (max_tokens, response_length)"));
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(with_clock(options)),
      pool_(std::make_unique<PagePool>(0)),
      tree_(std::make_unique<PrefixTree>(*pool_, options.share_prefix)),
      host_(options.host_pages),
      lengths_(options.conservativeness),
      queue_(options.policy) {}

// --- groups ---

void Scheduler::check_fits(const GroupRequest& request) const {
  const int32_t length = static_cast<int32_t>(request.prompt.size());
  if (!options_.chunked_prefill && length > options_.max_num_batched_tokens) {
    throw RequestError(400,
                       "prompt",
                       detail::concat("[rollout] prompt: wanted at most max_num_batched_tokens = ",
                                      options_.max_num_batched_tokens,
                                      " tokens without chunked prefill, got ",
                                      length,
                                      "; raise it or set enable_chunked_prefill"));
  }
  rollout::check_fits(length, request.max_new, capacity_, options_.page_bytes);
}

int32_t Scheduler::add(GroupRequest request) {
  BANYAN_ASSERT(!request.prompt.empty() && request.n >= 1 && request.max_new >= 0,
                "scheduler: added a group of nothing");
  check_fits(request);
  int32_t id = static_cast<int32_t>(groups_.size());
  if (free_ids_.empty()) {
    groups_.emplace_back();
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  groups_[id] = std::make_unique<Group>();
  Group& group = at(id);
  group.id = id;
  group.arrival = num_added_++;
  group.request = std::move(request);
  group.sequences.resize(group.request.n);
  group.source = lengths_.source(group.request.source);
  num_unfinished_ += group.size();
  join_unit(group);
  insert_again(group);
  queue_.push(group);
  sorted_revision_ = -1;
  return id;
}

// Those that come later than starve_seconds after the first are a unit of their own, so that nobody
// keeps a place in the queue for good.
void Scheduler::join_unit(Group& group) {
  if (group.request.group_id.empty() || options_.policy != SchedulingPolicy::kGroup) return;
  std::weak_ptr<Unit>& known = units_[group.request.group_id];
  group.unit = known.lock();
  if (!group.unit || now() - group.unit->opened > options_.starve_seconds) {
    group.unit = std::make_shared<Unit>(Unit{.arrival = group.arrival, .opened = now()});
    known = group.unit;
  }
  group.unit->queued.push_back(&group);
}

void Scheduler::append(int32_t group, int32_t child, int32_t token) {
  at(group).sequences[child].response.push_back(token);
}

void Scheduler::finish(int32_t id, int32_t child, Ended ended) {
  Group& group = at(id);
  Sequence& sequence = group.sequences[child];
  if (sequence.state == SequenceState::kFinished) return;
  if (sequence.state == SequenceState::kRunning) {
    publish(group, sequence, /*with_tail=*/true);
    release_pages(group, sequence);
    --num_running_;
  }
  release_host(sequence);
  sequence.state = SequenceState::kFinished;
  --num_unfinished_;
  ++group.num_finished;
  if (ended == Ended::kByItself && group.request.max_new > 0) {
    lengths_.add(group.source, static_cast<int32_t>(sequence.response.size()));
  }
  if (group.finished()) end_group(group);
}

void Scheduler::end_group(Group& group) {
  forget_undrawn(group);
  drop_trunk(group);
  tree_->leave(group.path);
  group.path.clear();
  if (group.seniority < 0) {
    queue_.erase(group);
    if (group.unit) std::erase(group.unit->queued, &group);
  } else {
    started_.erase(std::find(started_.begin(), started_.end(), &group));
    ranks_changed_ = true;
  }
  const double time = now();
  if (last_end_ > 0.0) {
    const double seconds = time - last_end_;
    seconds_per_group_ =
        seconds_per_group_ == 0.0 ? seconds : 0.9 * seconds_per_group_ + 0.1 * seconds;
  }
  last_end_ = time;
}

void Scheduler::drop(int32_t id) {
  if (at(id).finished()) return;
  ++counters_.dropped_groups;
  for (int32_t child = 0; child < at(id).size(); ++child) finish(id, child, Ended::kAborted);
}

void Scheduler::forget(int32_t id) {
  BANYAN_ASSERT(at(id).finished(), "scheduler: forgot a group with work left");
  const std::string unit = at(id).unit ? at(id).request.group_id : "";
  groups_[id].reset();
  const auto known = units_.find(unit);
  if (known != units_.end() && known->second.expired()) units_.erase(known);
  free_ids_.push_back(id);
}

// --- control ---

void Scheduler::close_queue(bool closed) {
  closed_ = closed;
  sorted_revision_ = -1;
  if (!closed) queue_.sort_by_arrival();
}

// The prompt's path under the present generation of the tree.
void Scheduler::insert_again(Group& group) {
  if (!group.path.empty()) tree_->leave(group.path);
  group.path = tree_->insert(group.prompt(), group.request.salt, !group.request.score_prompt);
  group.root = tree_->node(group.path.front()).parent;
  group.tainted = false;
  // Pages in host memory go with the trunk that they follow.
  for (Sequence& sequence : group.sequences) release_host(sequence);
  ranks_changed_ = true;
}

void Scheduler::insert_all_again() {
  for (const std::unique_ptr<Group>& group : groups_) {
    if (group && !group->finished() && group->num_held == 0 &&
        group->num_in(SequenceState::kRunning) == 0) {
      insert_again(*group);
    }
  }
  sorted_revision_ = -1;
}

void Scheduler::retract(Group& group) {
  for (Sequence& sequence : group.sequences) {
    if (sequence.state == SequenceState::kRunning) {
      stop_running(group, sequence);
      ++counters_.retractions;
    }
    release_host(sequence);
  }
  drop_trunk(group);
}

int32_t Scheduler::retract_all() {
  const int32_t count = num_running_;
  // Junior first: what seniors want again soonest is given up last.
  for (auto it = started_.rbegin(); it != started_.rend(); ++it) retract(**it);
  return count;
}

void Scheduler::new_epoch(bool keep) {
  ++epoch_;
  for (Group* group : started_) {
    if (keep && group->num_in(SequenceState::kRunning) > 0) {
      group->tainted = true;
    } else {
      retract(*group);
    }
  }
  tree_->new_generation();
  insert_all_again();
}

void Scheduler::reset_cache(bool retract) {
  if (retract) retract_all();
  tree_->new_generation();
  insert_all_again();
}

std::vector<int32_t> Scheduler::set_num_pages(int32_t num_pages) {
  retract_all();
  for (const std::unique_ptr<Group>& group : groups_) {
    if (group && !group->finished()) {
      tree_->leave(group->path);
      group->path.clear();
    }
  }
  tree_->new_generation();
  BANYAN_ASSERT(pool_->num_free() == pool_->num_pages(), "scheduler: pages leaked");
  evicted_before_ += tree_->num_evicted();
  tree_.reset();
  pool_ = std::make_unique<PagePool>(num_pages);
  tree_ = std::make_unique<PrefixTree>(*pool_, options_.share_prefix);
  if (num_pages > 0) capacity_ = num_pages;
  insert_all_again();
  std::vector<int32_t> impossible;
  for (const std::unique_ptr<Group>& group : groups_) {
    if (group && !group->finished() && num_pages > 0 &&
        pages_of_one(group->prompt_length(), group->request.max_new) > num_pages) {
      impossible.push_back(group->id);
    }
  }
  return impossible;
}

void Scheduler::set_host_pages(int32_t num_pages) {
  retract_all();
  host_ = PagePool(num_pages);
}

int32_t Scheduler::num_used_pages() const {
  return pool_->num_pages() - pool_->num_free() - tree_->num_cached();
}

SchedulerCounters Scheduler::counters() const {
  SchedulerCounters counters = counters_;
  counters.evicted_pages = evicted_before_ + tree_->num_evicted();
  return counters;
}

}  // namespace banyan::rollout
