// Decides what the next forward pass computes: which tokens, in which pages, and which rows are
// drawn from. Torch-free; the runner turns a Pass into tensors.
//
// Order of priority: (group, sample index), groups in depth-first order of the prefix tree, so
// prompts that share a trunk are neighbours and what the tree keeps for later is on the next
// group's path. Each pass:
//   1. running sequences get pages for what they know; without a free page, cached trunks go first,
//      then the youngest sequence loses its pages (it keeps its tokens and is computed again
//      later);
//   2. groups, then children of groups whose prompt is computed, are admitted in order while the
//   pages
//      that all are expected to need are there, or if nothing runs;
//   3. decodes, then chunks of prompts and of preempted sequences, up to max_num_batched_tokens.
// The first in priority can take the pages of all others, and every request fits the pool by itself
// (pages_of_one), so a call always ends.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/sequence.h"

namespace banyan::rollout {

struct SchedulerOptions {
  int32_t max_num_seqs = 256;
  int32_t max_num_batched_tokens = 2048;
  bool chunked_prefill = true;  // false: a prompt is computed in one pass
  // Share of its tokens that a response is expected to use when it is admitted (start value of the
  // rollout specification, section 4); 100 where nothing stops it early. A wrong guess costs a
  // preemption, not an error.
  int32_t expected_percent = 70;
};

inline constexpr int32_t kTrunk = -1;  // in place of a child: the group's prompt

// Consecutive tokens of a child or of a trunk.
struct Run {
  int32_t group = 0;
  int32_t child = kTrunk;
  int32_t first_position = 0;
  int32_t num_tokens = 0;
};

// A row of the pass whose logits are drawn from: once for a child, once for each child for kTrunk.
struct DrawRow {
  int32_t row = 0;  // token of the pass
  int32_t group = 0;
  int32_t child = kTrunk;
};

struct PageCopy {
  int32_t from = 0;
  int32_t to = 0;
};

struct Pass {
  std::vector<PageCopy> copies;  // before the forward, in order
  std::vector<Run> runs;         // siblings adjacent
  std::vector<DrawRow> decodes;  // rows of children, ascending
  std::vector<DrawRow> trunks;   // rows of prompts, ascending
  int32_t num_tokens = 0;
  int32_t num_prompt_tokens = 0;  // of trunks

  void clear();
};

// Pages that the first response of a prompt needs while nothing else runs.
int32_t pages_of_one(int32_t prompt_length, int32_t max_new);

class Scheduler {
 public:
  // Sorts `groups`, inserts their prompts in `tree`. All arguments are borrowed.
  Scheduler(const SchedulerOptions& options,
            PagePool& pool,
            PrefixTree& tree,
            std::vector<Group>& groups);

  bool done() const { return num_unfinished_ == 0; }
  // Fills the next pass; done() must be false. Its rows count as computed from here on: the caller
  // runs it, then appends a token to every child that is drawn for.
  void next_pass(Pass& pass);
  // A token drawn for a child.
  void append(int32_t group, int32_t child, int32_t token, float logprob);
  // The child ends: its pages are free.
  void finish(int32_t group, int32_t child);

  int64_t num_preemptions() const { return num_preemptions_; }
  // Pages of the running child or of the trunk, positions 0..end - 1.
  void pages_of(const Run& run, std::vector<int32_t>& pages) const;

 private:
  void grow_running(Pass& pass);
  void admit(Pass& pass);
  bool admit_child(int32_t group, int32_t child, Pass& pass);
  void plan_runs(Pass& pass);
  void plan_trunk(int32_t group, int32_t& budget, Pass& pass);
  void plan_child(int32_t group, int32_t child, int32_t count, Pass& pass);

  bool cover(int32_t group, int32_t child, Pass& pass);
  bool reclaim(int32_t group, int32_t child);
  void preempt(Sequence& sequence);
  void drop_trunk(Group& group);
  bool trunk_ready(const Group& group) const;
  int32_t available() const { return pool_.num_free() + tree_.num_cached(); }
  int32_t expected_pages(const Group& group, const Sequence& sequence) const;

  SchedulerOptions options_;
  PagePool& pool_;
  PrefixTree& tree_;
  std::vector<Group>& groups_;
  std::vector<std::vector<int32_t>> ends_;  // per node: groups whose prompt ends there
  int32_t first_unfinished_ = 0;            // groups before it are finished
  int32_t end_admitted_ = 0;                // groups from here on were never admitted
  int32_t num_unfinished_ = 0;
  int32_t num_running_ = 0;
  int64_t num_preemptions_ = 0;
};

}  // namespace banyan::rollout
