// What a pass computes: decodes first, then pieces of prompts and of preempted responses by
// seniority. A prompt that several groups share is computed once: a later group starts where an
// earlier one of the same pass arrives, and waits only where that one stops short of it.
#include <algorithm>
#include <limits>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {

void Pass::clear() {
  copies.clear();
  runs.clear();
  decodes.clear();
  trunks.clear();
  prompt_rows.clear();
  num_decode_runs = 0;
  num_tokens = 0;
  num_prompt_tokens = 0;
}

bool Scheduler::next_pass(Pass& pass) {
  pass.clear();
  undo_computed_.clear();
  undo_drawn_.clear();
  if (idle() || pool_->num_pages() == 0) return false;
  preempted_ = false;
  for (Group* group : started_) {
    for (Sequence& sequence : group->sequences) {
      if (sequence.state == SequenceState::kRunning) publish(*group, sequence, /*with_tail=*/false);
    }
  }
  for (Group* group : started_) {
    for (int32_t child = 0; child < group->size(); ++child) {
      Sequence& sequence = group->sequences[child];
      if (sequence.state != SequenceState::kRunning) continue;
      if (!cover(*group, child, pass)) preempt(*group, sequence, pass);
    }
  }
  admit(pass);
  plan(pass);
  if (pass.num_tokens == 0) {
    BANYAN_ASSERT(pass.copies.empty(), "scheduler: copies without a pass");
    return false;
  }
  ++counters_.passes;
  counters_.pass_tokens += pass.num_tokens;
  if (!preempted_) lengths_.on_quiet_pass();
  return true;
}

void Scheduler::withdraw_pass() {
  for (auto it = undo_computed_.rbegin(); it != undo_computed_.rend(); ++it) {
    tree_->rewind(it->first, it->second);
  }
  for (const int32_t id : undo_drawn_) {
    if (!groups_[id]) continue;  // forgotten: the caller failed after the draws
    Group& group = at(id);
    group.drawn = false;
    counters_.prompt_tokens -= group.prompt_length();
    counters_.cached_prompt_tokens -= group.num_cached;
    counters_.sibling_shared_tokens -=
        int64_t{group.size() - group.num_finished - 1} * group.prompt_length();
  }
  undo_computed_.clear();
  undo_drawn_.clear();
  // Frees the slots of host memory too: what was to be spilled may not be there.
  retract_all();
}

void Scheduler::plan(Pass& pass) {
  decode_runs_.clear();
  chunk_runs_.clear();
  trunk_runs_.clear();
  drawn_.clear();
  in_production_.clear();
  const int32_t budget = options_.max_num_batched_tokens;
  const int32_t decodes = plan_decodes(starves_unchunked() ? 0 : budget);
  const bool prompts_now =
      decodes == 0 || ++passes_without_prompts_ >= options_.prefill_schedule_interval;
  if (prompts_now) {
    passes_without_prompts_ = 0;
    plan_chunks(budget - decodes);
  }
  assemble(pass);
}

// The decodes of the senior, where not all have room. Their number.
int32_t Scheduler::plan_decodes(int32_t budget) {
  for (Group* group : started_) {
    for (int32_t child = 0; child < group->size(); ++child) {
      Sequence& sequence = group->sequences[child];
      if (sequence.state != SequenceState::kRunning ||
          group->known(sequence) - sequence.computed != 1) {
        continue;
      }
      if (budget-- <= 0) return static_cast<int32_t>(decode_runs_.size());
      decode_runs_.push_back({.group = group->id,
                              .child = child,
                              .first_position = sequence.computed++,
                              .num_tokens = 1});
    }
  }
  return static_cast<int32_t>(decode_runs_.size());
}

void Scheduler::plan_chunks(int32_t budget) {
  const int32_t most = options_.long_prefill_token_threshold > 0
                           ? options_.long_prefill_token_threshold
                           : std::numeric_limits<int32_t>::max();
  bool skipped = false;
  for (Group* group : started_) {
    if (group->holds_trunk() && (!group->drawn || !trunk_ready(*group))) {
      skipped |= !plan_trunk(*group, budget, most);
    }
    for (int32_t child = 0; child < group->size(); ++child) {
      Sequence& sequence = group->sequences[child];
      const int32_t behind = group->known(sequence) - sequence.computed;
      // One behind is a decode: planned already, or without room among them.
      if (sequence.state != SequenceState::kRunning || behind < 2) continue;
      const int32_t count = std::min({behind, budget, most});
      if (count == 0) continue;
      chunk_runs_.push_back({.group = group->id,
                             .child = child,
                             .first_position = sequence.computed,
                             .num_tokens = count});
      sequence.computed += count;
      counters_.recomputed_tokens += std::min(count, behind - 1);
      budget -= count;
    }
  }
  if (!skipped) {
    skipped_since_ = -1.0;
  } else if (skipped_since_ < 0.0) {
    skipped_since_ = now();
  }
}

// Without chunked prefill decodes may leave a prompt no room for ever: now and then they wait.
bool Scheduler::starves_unchunked() const {
  return skipped_since_ >= 0.0 && now() - skipped_since_ >= options_.starve_seconds;
}

// False: the prompt cannot be cut and does not fit beside what is planned.
bool Scheduler::plan_trunk(Group& group, int32_t& budget, int32_t most) {
  const int32_t length = group.prompt_length();
  int32_t first = tree_->computed(group.path);
  // All of it is cached: the last position is computed again, for its logits. It is the last one of
  // its page, and the keys and values written are those that stand there.
  if (!group.drawn) first = std::min(first, length - 1);
  const int32_t left = length - first;
  const auto frontier = [&](int32_t position) { return group.path[position / kPageTokens]; };
  if (std::find(in_production_.begin(), in_production_.end(), frontier(first)) !=
      in_production_.end()) {
    return true;
  }
  const int32_t count = options_.chunked_prefill ? std::min({left, budget, most}) : left;
  if (count > budget) return false;
  if (count == 0) return true;
  const int32_t end = first + count;
  for (int32_t position = first; position < end; position += kPageTokens) {
    const int32_t node = frontier(position);
    undo_computed_.emplace_back(node, tree_->node(node).computed);
  }
  undo_computed_.emplace_back(frontier(end - 1), tree_->node(frontier(end - 1)).computed);
  draw_ends(group, first, count);
  trunk_runs_.push_back(
      {.group = group.id, .child = kTrunk, .first_position = first, .num_tokens = count});
  tree_->advance(group.path, end);
  if (end < length) in_production_.push_back(frontier(end));
  group.num_computed += count;
  counters_.computed_prompt_tokens += count;
  budget -= count;
  return true;
}

// Groups whose prompt ends within the run that is about to be planned are drawn for.
void Scheduler::draw_ends(const Group& group, int32_t first, int32_t count) {
  for (const int32_t index : group.path) {
    const PrefixTree::Node& node = tree_->node(index);
    if (node.end() <= first || node.end() > first + count) continue;
    const auto entry = undrawn_.find(index);
    if (entry == undrawn_.end()) continue;
    for (const int32_t id : entry->second) {
      Group& ended = at(id);
      ended.drawn = true;
      undo_drawn_.push_back(id);
      // The group's own tokens of this run are not counted yet.
      const int32_t own = ended.num_computed + (id == group.id ? count : 0);
      ended.num_cached = std::max(0, ended.prompt_length() - own);
      counters_.prompt_tokens += ended.prompt_length();
      counters_.cached_prompt_tokens += ended.num_cached;
      counters_.sibling_shared_tokens +=
          int64_t{ended.size() - ended.num_finished - 1} * ended.prompt_length();
      if (ended.request.max_new > 0) {
        drawn_.push_back(
            {.run = trunk_runs_.size(), .offset = node.end() - 1 - first, .group = id});
      }
    }
    undrawn_.erase(entry);
  }
}

// Neighbours in the tree get neighbouring ranks: paths with a common beginning are adjacent in
// lexicographic order.
void Scheduler::update_ranks() {
  if (!ranks_changed_) return;
  ranks_changed_ = false;
  by_path_ = started_;
  std::sort(by_path_.begin(), by_path_.end(), [](const Group* a, const Group* b) {
    return a->path != b->path ? a->path < b->path : a->seniority < b->seniority;
  });
  for (size_t i = 0; i < by_path_.size(); ++i) by_path_[i]->rank = static_cast<int32_t>(i);
}

void Scheduler::assemble(Pass& pass) {
  update_ranks();
  const auto by_rank = [&](const Run& a, const Run& b) {
    const int32_t rank_a = at(a.group).rank;
    const int32_t rank_b = at(b.group).rank;
    return rank_a != rank_b ? rank_a < rank_b : a.child < b.child;
  };
  std::sort(decode_runs_.begin(), decode_runs_.end(), by_rank);
  std::sort(chunk_runs_.begin(), chunk_runs_.end(), by_rank);
  const auto add_children = [&](const std::vector<Run>& runs) {
    for (const Run& run : runs) {
      pass.runs.push_back(run);
      pass.num_tokens += run.num_tokens;
      const Group& group = at(run.group);
      if (run.first_position + run.num_tokens == group.known(group.sequences[run.child])) {
        pass.decodes.push_back(
            {.row = pass.num_tokens - 1, .group = run.group, .child = run.child});
      }
    }
  };
  add_children(decode_runs_);
  pass.num_decode_runs = static_cast<int32_t>(decode_runs_.size());
  add_children(chunk_runs_);
  auto drawn = drawn_.begin();  // in order of runs and rows
  for (size_t r = 0; r < trunk_runs_.size(); ++r) {
    const Run& run = trunk_runs_[r];
    for (; drawn != drawn_.end() && drawn->run == r; ++drawn) {
      pass.trunks.push_back(
          {.row = pass.num_tokens + drawn->offset, .group = drawn->group, .child = kTrunk});
    }
    if (at(run.group).request.score_prompt) {
      pass.prompt_rows.push_back({.row = pass.num_tokens,
                                  .group = run.group,
                                  .first_position = run.first_position,
                                  .num_tokens = run.num_tokens});
    }
    pass.runs.push_back(run);
    pass.num_tokens += run.num_tokens;
    pass.num_prompt_tokens += run.num_tokens;
  }
}

}  // namespace banyan::rollout
