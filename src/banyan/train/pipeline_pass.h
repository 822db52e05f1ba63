// What one rank of a pipeline does in a walk: which forwards and backwards in which order
// (parallel/pipeline_schedule.h), and the rows and gradients that go from stage to stage. One
// process runs the entries of the plan, and nothing moves.
//
// A block of T tokens sends T E numbers of the compute dtype from each stage to the next, and as
// many back; with sequence parallel each rank ceil(T / n) E of them to the rank of the next stage
// that holds the same rows. Sends do not wait for their receiver: as every rank knows the lists of
// all, a message from another stage tells which of the own ones have arrived there, and these are
// freed. Where rows go one way only, from rank to rank in one chunk, nothing comes back: then no
// more than two messages per stage are open, and the sender waits for the oldest. Messages travel
// by way of the CPU: on a device's own transport the two directions between two ranks would wait
// for each other.
//
// Ranks that hold different experts of the same layers take part in each other's passes. Before a
// pass they agree on one order of steps (parallel/lockstep.h); a step without a block of the own is
// an idle one, and no message belongs to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/parallel/pipeline_schedule.h"
#include "banyan/parallel/pipeline_stage.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

class PipelinePass {
 public:
  // Tokens of a round that this rank computes.
  using TokensOf = std::function<int64_t(int32_t round)>;

  // Both are borrowed.
  PipelinePass(const models::CausalLM& model, const trie::Plan& plan, TokensOf tokens_of);

  bool is_alone() const { return stage_ == nullptr; }
  int64_t num_chunks() const { return stage_ == nullptr ? 1 : stage_->num_chunks(); }
  bool is_first(int64_t chunk) const { return stage_ == nullptr || stage_->is_first(chunk); }
  bool is_last(int64_t chunk) const { return stage_ == nullptr || stage_->is_last(chunk); }
  // True where heads and losses are.
  bool has_head() const { return stage_ == nullptr || stage_->is_last_rank(); }

  // (all) What this rank runs for `own` entries, and the begin of it: the ranks make sure that they
  // have the same plan, and go in step with those that share experts with them. A block of the
  // steps is one of the plan, or a round (train/context_pass.h).
  const parallel::PipelineSteps& begin(const std::vector<trie::Entry>& own);
  // Every message has arrived.
  void end();

  // Rows that the stage before sent, and gradients from the stage behind, for a round of which this
  // rank has a part.
  at::Tensor receive_rows(int32_t round, int32_t chunk);
  at::Tensor receive_gradient(int32_t round, int32_t chunk);
  void send_rows(int32_t round, int32_t chunk, const at::Tensor& rows);
  void send_gradient(int32_t round, int32_t chunk, const at::Tensor& gradient);

  // The ranks of all stages; null in one process.
  parallel::Collectives* stages() const { return stage_ == nullptr ? nullptr : &stage_->ranks(); }

  // (all) The last stage's numbers, on all.
  void tell(at::Tensor& numbers);

 private:
  struct Sent {
    int64_t to = 0;
    size_t arrives = 0;  // the receiver's step that takes it
    std::function<void()> wait;
  };
  // The place of an own chunk among those of all stages (parallel/stages.h).
  int64_t link_of(int32_t chunk) const;
  // Names the forward or backward of a round on a link; the tag of the message that it takes.
  int64_t key_of(int64_t link, trie::Action action, int32_t round) const;
  // Its place in the list of that link's stage.
  size_t step_of(int64_t link, trie::Action action, int32_t round) const;
  std::vector<int64_t> shape_of(int32_t round) const;
  void send(int64_t to_link, trie::Action action, int32_t round, const at::Tensor& tensor);
  at::Tensor receive(int64_t from_link, int64_t link, trie::Action action, int32_t round);

  const models::CausalLM& model_;
  const trie::Plan& plan_;
  TokensOf tokens_of_;
  const parallel::PipelineStage* stage_;
  std::vector<parallel::PipelineSteps> lists_;              // [ranks]
  std::vector<std::unordered_map<int64_t, size_t>> steps_;  // [ranks]: key of a step -> its place
  std::deque<Sent> sent_;
  int64_t most_open_ = 0;  // 0: as many as there are
};

}  // namespace banyan::train
