// What each rank of a pipeline runs in a pass over a plan, and in which order (specification
// parallel 5, trie training A13). Torch-free; every rank computes the lists of all.
//
// A plan fixes the order of forwards and of backwards, and how many forwards n_k stand before
// backward k: on samples without shared parts n_k = k; on a trunk A with branches b it is the
// bracket F(A) {F(b) B(b)} B(A), where a trunk's backward comes behind those of its branches.
//
// One chunk a rank (1F1B): rank r of p runs min(m, n_k + p - 1 - r) forwards before backward k, so
// the last rank runs the plan as it is, and n_k = k gives 1F1B: warm-up, one forward and one
// backward in turn, drain.
//
// v chunks a rank (interleaved): forwards and backwards are put in groups of p blocks, the first
// group larger by what does not divide; a group passes chunk 0, then chunk 1, ..., backwards the
// other way. Rank r runs min(m v, C_i + 2 (p - 1 - r)) forwards before its backward i, with C_i
// what the last rank needs for it: where n_k = k, Megatron's schedule with groups of p.
//
// Entries may be idle ones (lockstep.h): passes of other ranks, which this one has no block for but
// takes part in. A place in the lists is theirs as any other's, so what is said above holds of
// places: all ranks that hold experts of one stage, each in a pipeline of its own, get lists of
// equal actions and chunks and go through them step by step, as one.
//
// A list is tried out before it is handed out: should ranks wait for each other in a circle, more
// forwards come first, at worst all of them, which is legal for every plan. The trial counts
// places, idle ones too. So it also holds of pipelines that go in step: a step that all of a stage
// wait for begins when the messages for its place are there, which is what the trial asks.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "banyan/parallel/lockstep.h"
#include "banyan/trie/plan.h"

namespace banyan::parallel {

struct PipelineStep {
  trie::Action action = trie::Action::kForward;
  int32_t round = 0;  // Plan::blocks_per_round: a block, or several at one time; or kIdle
  int32_t chunk = 0;
  friend bool operator==(const PipelineStep&, const PipelineStep&) = default;
};
using PipelineSteps = std::vector<PipelineStep>;

// [ranks]. A loss stands on the last rank behind the forward that completes it; a recompute in
// front of its backward. `entries` may be forwards alone. One rank with one chunk: the entries.
std::vector<PipelineSteps> pipeline_schedule(const std::vector<trie::Entry>& entries,
                                             int64_t num_ranks,
                                             int64_t num_chunks);

// The lists of the inputs that came last: the passes of a mini-batch, and of mini-batches cut
// alike, have equal ones. Used by one thread.
class PipelineSchedules {
 public:
  // As pipeline_schedule; good until the next call.
  const std::vector<PipelineSteps>& of(const std::vector<trie::Entry>& entries,
                                       int64_t num_ranks,
                                       int64_t num_chunks);

 private:
  struct Known {
    std::vector<trie::Entry> entries;
    int64_t num_ranks = 0;
    int64_t num_chunks = 0;
    std::vector<PipelineSteps> lists;
  };
  std::deque<Known> known_;  // the newest first
};

// True if ranks that send without waiting for the receiver get through these lists.
bool completes(const std::vector<PipelineSteps>& ranks, int64_t num_chunks);

}  // namespace banyan::parallel
