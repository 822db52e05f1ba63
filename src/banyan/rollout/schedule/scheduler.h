// Decides what the next forward pass computes: which tokens, in which pages, and which rows are
// drawn from. Groups are added, aborted and dropped at any time between passes; the prefix tree and
// what was learned of response lengths live as long as the scheduler. Torch-free. One thread.
//
//   const int32_t group = scheduler.add({.prompt = ..., .n = 8, .max_new = 512});
//   while (scheduler.next_pass(pass)) {
//     run it; for every row drawn from: scheduler.append(group, child, token);
//     scheduler.finish(group, child, Ended::kStopped) where a response ended;
//     scheduler.forget(group) once all have and nobody needs the tokens any more
//   }
//
// Each pass:
//   1. whole pages of responses that the last pass completed are published in the tree;
//   2. running responses get pages for what they know, in order of seniority; without a free page
//      cached ones go first (least recently used, suffixes before trunks), then the youngest group
//      loses private pages (its tokens are kept, they are computed again later or come back from
//      host memory); the prompt that siblings share stays;
//   3. started groups, then waiting ones in the order of the policy are admitted while the pages
//      that all are expected to need are there (section 4 of the rollout specification), or if
//      nothing runs;
//   4. decodes, then pieces of prompts and of preempted responses, up to max_num_batched_tokens.
// The senior group can take the pages of all others, and every request fits the pool by itself
// (pages_of_one), so everything ends.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "banyan/rollout/memory/page_pool.h"
#include "banyan/rollout/memory/prefix_tree.h"
#include "banyan/rollout/schedule/length_estimate.h"
#include "banyan/rollout/schedule/options.h"
#include "banyan/rollout/schedule/pass.h"
#include "banyan/rollout/schedule/sequence.h"
#include "banyan/rollout/schedule/waiting_queue.h"

namespace banyan::rollout {

// Pages that the first response of a prompt needs while nothing else runs.
int32_t pages_of_one(int32_t prompt_length, int32_t max_new);

// A group must fit the pool by itself, one response at a time: throws RequestError 400 if it never
// can. A pool of no pages is not known yet.
void check_fits(int32_t prompt_length, int32_t max_new, int32_t num_pages, int64_t page_bytes);

// Why a response ends; lengths are learned from the first kind only.
enum class Ended : uint8_t { kByItself, kAborted };

// Since the scheduler was made.
struct SchedulerCounters {
  int64_t passes = 0;
  int64_t pass_tokens = 0;
  int64_t prompt_tokens = 0;           // of groups whose prompt is done, once each: cache queries
  int64_t computed_prompt_tokens = 0;  // that went through the model, again after a preemption too
  int64_t cached_prompt_tokens = 0;    // of prompt_tokens, computed for another request: cache hits
  int64_t sibling_shared_tokens = 0;   // prompt tokens that siblings did not compute
  int64_t recomputed_tokens = 0;       // positions of responses computed again
  int64_t preemptions = 0;             // for want of pages
  int64_t retractions = 0;             // by retract_all and the like
  int64_t spilled_pages = 0;
  int64_t restored_pages = 0;
  int64_t evicted_pages = 0;
  int64_t dropped_groups = 0;  // ended by drop before all their responses did
};

class Scheduler {
 public:
  // Without pages until set_num_pages: nothing is planned before.
  explicit Scheduler(const SchedulerOptions& options);

  // --- groups ---
  // Takes a group; its id is valid until forget(). Throws RequestError 400 if it can never fit (the
  // pool, or a pass without chunked prefill). How many may wait is the caller's to decide.
  int32_t add(GroupRequest request);
  const Group& group(int32_t id) const { return *groups_[id]; }
  // A token drawn for a child.
  void append(int32_t group, int32_t child, int32_t token);
  // The child ends, in whatever state: its pages are free or published. Again: no effect.
  void finish(int32_t group, int32_t child, Ended ended);
  // Ends every child that has not ended. Their tokens stay readable until forget().
  void drop(int32_t group);
  // The id of a finished group is free to be used again.
  void forget(int32_t group);

  // --- passes ---
  // Fills the next pass. False, with an empty pass: nothing to compute. Its rows count as computed
  // from here on: the caller runs it, then appends a token to every child that is drawn for, or
  // calls withdraw_pass.
  bool next_pass(Pass& pass);
  // The last pass failed: nothing that it should have computed counts, and what ran is recomputed.
  // To be called before anything else is.
  void withdraw_pass();
  // Pages of the running child or of the trunk, positions 0..first_position + num_tokens - 1.
  // Valid until the next call that changes anything.
  std::span<const int32_t> pages_of(const Run& run) const;

  // --- control; all succeed in any state, between passes ---
  // No more groups are to come: longest first. false: open again.
  void close_queue(bool closed);
  // Puts everything that runs back in the queue, without pages; tokens are kept. The number of
  // responses.
  int32_t retract_all();
  // The weights have changed: nothing from before is matched again. keep: what runs goes on with
  // its old keys and values, tainted; else it is retracted.
  void new_epoch(bool keep);
  int64_t epoch() const { return epoch_; }
  // Forgets everything cached, and with `retract` what runs.
  void reset_cache(bool retract);
  // A pool of another size (0 while asleep): retracts everything and forgets the cache. Returns the
  // groups that can never fit any more; the caller drops them.
  std::vector<int32_t> set_num_pages(int32_t num_pages);
  // Pages that fit in host memory (SchedulerOptions::host_pages). Retracts everything.
  void set_host_pages(int32_t num_pages);
  void set_spill_costs(const SpillCosts& costs) { spill_costs_ = costs; }

  // --- figures ---
  bool idle() const { return num_unfinished_ == 0; }  // every response of every group has ended
  int32_t num_running() const { return num_running_; }
  int32_t num_waiting() const { return num_unfinished_ - num_running_; }
  int32_t num_groups_queued() const { return queue_.size(); }  // never admitted yet
  int64_t num_queued_prompt_tokens() const { return queue_.prompt_tokens(); }
  int32_t num_groups_started() const { return static_cast<int32_t>(started_.size()); }
  int32_t num_pages() const { return pool_->num_pages(); }
  int32_t num_used_pages() const;
  int32_t num_cached_pages() const { return tree_->num_cached(); }
  SchedulerCounters counters() const;
  // Between the ends of groups, lately; 0 before the second.
  double seconds_per_group() const { return seconds_per_group_; }
  const LengthEstimate& lengths() const { return lengths_; }
  const PagePool& pool() const { return *pool_; }
  const PagePool& host() const { return host_; }
  const PrefixTree& tree() const { return *tree_; }

 private:
  // What is left to give during one admission.
  struct Room {
    int32_t seats = 0;    // responses
    int64_t pages = 0;    // not promised to anyone
    bool active = false;  // something runs, so pages will come back and waiting is safe
  };
  struct Start {
    int32_t seats = 0;
    int64_t pages = 0;
  };
  struct Drawn {
    size_t run = 0;      // of trunk_runs_
    int32_t offset = 0;  // row within it
    int32_t group = 0;
  };

  Group& at(int32_t id) { return *groups_[id]; }
  double now() const { return options_.now(); }

  // scheduler.cpp
  void check_fits(const GroupRequest& request) const;
  void join_unit(Group& group);
  void end_group(Group& group);
  void insert_again(Group& group);
  void insert_all_again();
  void retract(Group& group);

  // residency.cpp: who holds which pages
  bool shares(const Group& group) const;
  bool is_stale(const Group& group) const;
  bool trunk_ready(const Group& group) const;
  int32_t node_above(const Group& group, const Sequence& sequence) const;
  bool hold_trunk(Group& group, Pass& pass);
  void drop_trunk(Group& group);
  void forget_undrawn(const Group& group);
  void publish(Group& group, Sequence& sequence, bool with_tail);
  void release_pages(const Group& group, Sequence& sequence);
  void release_host(Sequence& sequence);
  bool find_pages(const Group& group, int32_t child, int32_t count, Pass& pass);
  bool cover(Group& group, int32_t child, Pass& pass);
  bool reclaim(const Group& group, int32_t child, Pass& pass);
  void preempt(Group& group, Sequence& sequence, Pass& pass);
  void stop_running(const Group& group, Sequence& sequence);

  // admission.cpp
  int32_t expected_pages(const Group& group, const Sequence& sequence) const;
  Room room() const;
  void admit(Pass& pass);
  void admit_waiting(Room& room, Pass& pass);
  Start children_to_start(const Group& group, int64_t trunk_cost, const Room& room) const;
  bool waits_for_unit(const Group& group, int64_t pages, const Room& room) const;
  bool admit_group(Group& group, Room& room, Pass& pass);
  bool admit_children(Group& group, Room& room, Pass& pass);
  bool start_child(Group& group, int32_t child, Pass& pass);
  void resume_pages(Group& group, Sequence& sequence);
  bool restore(Group& group, int32_t child, Pass& pass);
  void enter(Group& group);

  // planning.cpp
  void plan(Pass& pass);
  int32_t plan_decodes(int32_t budget);
  void plan_chunks(int32_t budget);
  bool plan_trunk(Group& group, int32_t& budget, int32_t most);
  void draw_ends(const Group& group, int32_t first, int32_t count);
  void assemble(Pass& pass);
  bool starves_unchunked() const;
  void update_ranks();

  SchedulerOptions options_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PrefixTree> tree_;
  PagePool host_;         // slots of host memory
  int32_t capacity_ = 0;  // pages, also while asleep
  LengthEstimate lengths_;
  WaitingQueue queue_;
  SpillCosts spill_costs_;
  SchedulerCounters counters_;
  std::vector<std::unique_ptr<Group>> groups_;  // by id; null: free
  std::vector<int32_t> free_ids_;
  std::vector<Group*> started_;  // admitted and unfinished, senior first
  std::unordered_map<std::string, std::weak_ptr<Unit>> units_;  // by group_id
  std::unordered_map<int32_t, std::vector<int32_t>> undrawn_;   // end of the path: groups that hold
                                                                // it and wait for their first draw
  int32_t num_unfinished_ = 0;                                  // responses
  int32_t num_running_ = 0;
  int64_t num_added_ = 0;
  int64_t num_entered_ = 0;
  int64_t epoch_ = 0;
  int64_t evicted_before_ = 0;  // of trees before this one
  bool closed_ = false;
  bool ranks_changed_ = false;
  int64_t sorted_revision_ = -1;  // of lengths_, when a closed queue was sorted; -1: sort it
  int64_t blocked_arrival_ = -1;  // head of the queue that did not fit, and since when
  double blocked_since_ = 0.0;
  double skipped_since_ = -1.0;  // a whole prompt finds no room beside the decodes; -1: none
  int32_t passes_without_prompts_ = 0;
  bool preempted_ = false;  // in this pass
  double last_end_ = 0.0;   // of a group
  double seconds_per_group_ = 0.0;

  // Of the pass being planned.
  std::vector<Run> decode_runs_;
  std::vector<Run> chunk_runs_;
  std::vector<Run> trunk_runs_;
  std::vector<Drawn> drawn_;
  std::vector<Group*> by_path_;
  std::vector<int32_t> in_production_;  // nodes that a piece of the pass leaves incomplete
  // To take it back.
  std::vector<std::pair<int32_t, int32_t>> undo_computed_;  // node, computed before
  std::vector<int32_t> undo_drawn_;                         // groups
  std::vector<int32_t> tokens_;                             // reused
};

}  // namespace banyan::rollout
