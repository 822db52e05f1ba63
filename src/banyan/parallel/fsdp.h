// Fully sharded data parallel (ZeRO-3; Rajbhandari et al. 2020; Zhao et al., "PyTorch FSDP", 2023).
//
// The parameters of a unit (a layer; the root: embedding, last norm, head) are one stream of
// numbers, padded to a multiple of the ranks of the shard group and cut in equal pieces:
//   unit u = [ piece of rank 0 | piece of rank 1 | ... | zeros ]
// A rank holds its piece of every unit, whatever parameters lie in it: fp32 master, gradient and
// the optimizer's moments, 16 / n bytes per parameter of a model over n ranks. Around the use of a
// unit its weights are gathered, in the type that the model computes in, and packed; then they are
// dropped (`reshard_after_forward`), or kept until the unit's backward. Gradients are summed in
// fp32 in rank order, each piece by its owner, as everywhere in this folder: so what one backward
// per rank gives has the bits of ZeRO-1.
//
// Hybrid: the `shard` group holds one copy of the weights, `replica` are ranks with equal pieces of
// different copies; sums run over the shard group first.
//
// Bytes sent by a rank, with N_u numbers in unit u, p_u = ceil(N_u / n), element size e of the
// gather (2 in bf16; that of the master where the model computes with it, and in fp32):
//   forward, backward   sum_u (n - 1) p_u e each (all_gather); with reshard_after_forward = false
//                       only what is not there yet
//   gradients           sum_u (n - 1) p_u 4 (all_to_all) with every backward, or once per step
//   R replicas          2 (R - 1) / R p_u 4 more (all_to_all and all_gather of the replica group)
// and of layers that run again in front of their backward, whose unit has more than one layer, one
// more gather each.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/parallel/collectives.h"
#include "banyan/parallel/ordered_tasks.h"
#include "banyan/parallel/unit_memory.h"

namespace banyan::parallel {

struct FsdpOptions {
  bool reshard_after_forward = true;  // false: weights stay from a forward to the next backward
  bool forward_prefetch = false;      // gathers the next unit while one computes
  // Gradients go to their owners with every backward: a rank never holds more than two units' whole
  // gradients. False: with the last backward of a step, until when a rank holds all of them, at
  // 4 bytes per parameter; sums then have the bits of ZeRO-1 for any number of blocks.
  bool reduce_each_pass = true;
  bool with_gradients = true;
  at::ScalarType compute = at::kFloat;  // of the model
};

// Ranks that train together, borrowed. `all` is shard x replica: they agree on the passes.
struct FsdpGroups {
  Collectives* all = nullptr;
  Collectives* shard = nullptr;
  Collectives* replica = nullptr;
};

// A run of numbers of a parameter that a rank holds, `at` in its piece of the unit.
struct OwnedRange {
  size_t param = 0;  // in the whole table
  int64_t begin = 0;
  int64_t count = 0;
  int64_t unit = 0;
  int64_t at = 0;
};

class Fsdp final : public ParamKeeper {
 public:
  using UnitUses = std::function<std::vector<UnitUse>(Pass)>;

  // Takes over `whole`, whose masters are equal on all ranks, or empty and then put(): keeps this
  // rank's pieces, drops the rest and becomes the table's keeper, until destroyed. `uses` are the
  // model's.
  Fsdp(ParamTable& whole, const FsdpGroups& groups, const FsdpOptions& options, UnitUses uses);
  ~Fsdp() override;

  void start(const std::string& passes) override;
  void begin(Pass pass) override;
  void end(Pass pass) override;
  void finish() override;
  void enter(int64_t unit) override;
  void leave(int64_t unit) override;
  ParamTable& parts() override { return parts_; }
  void changed() override;
  void put(size_t param, const at::Tensor& values) override;

  // What a rank of the shard group holds, unit by unit in the order of the table; at most one run
  // of a parameter.
  std::vector<OwnedRange> owned(int64_t rank) const;
  const ParamTable& whole() const { return whole_; }
  Collectives& shard() const { return *groups_.shard; }
  Collectives& replica() const { return *groups_.replica; }

  // (all) Visits every parameter whole, as `type`, on the host or device that holds it.
  using Visit = std::function<void(const Param& param, const at::Tensor& whole)>;
  void each(at::ScalarType type, const Visit& visit);
  // (all) Gives a whole model of the same parameters the present weights: its compute forms, and
  // only masters that are forms; `units` is the receiver's, one per unit.
  void hand_over(std::vector<UnitWeights>& units);
  // As each(), of pieces like those of parts() in place of the masters (gradients, moments).
  void each_of(const std::vector<at::Tensor>& pieces, at::ScalarType type, const Visit& visit);

  int64_t num_gathers() const { return num_gathers_; }

 private:
  struct Unit {
    std::unique_ptr<UnitWeights> weights;
    std::unique_ptr<ComingMemory> gradients;
    at::ScalarType gather_type = at::kFloat;
    int64_t piece = 0;      // numbers that a rank holds
    int64_t asked = 0;      // task that gathers it; 0: none
    at::Tensor gathered;    // by that task
    bool is_there = false;  // gathered, and not dropped since
  };

  void cut(int64_t u);
  void open(Pass pass, bool idle);
  void close(Pass pass);
  void idle(Pass pass);
  void ask(int64_t u);
  void need(int64_t u);
  void drop(int64_t u);
  void take_gradients(int64_t u);
  void reduce(int64_t u);
  at::Tensor flat_gradients(int64_t u);
  at::Tensor gather(const at::Tensor& piece, at::ScalarType type);

  ParamTable& whole_;
  FsdpGroups groups_;
  FsdpOptions options_;
  UnitUses uses_of_;
  ParamTable parts_;
  std::vector<Unit> units_;

  std::string own_, agreed_;  // passes of this rank, and of all
  size_t own_at_ = 0, agreed_at_ = 0;
  int64_t backwards_left_ = 0;
  std::vector<UnitUse> uses_;  // of the pass in progress
  size_t next_ = 0;
  bool idle_ = false;
  int64_t num_gathers_ = 0;
  OrderedTasks tasks_;  // last: its thread ends before what it uses
};

}  // namespace banyan::parallel
