// AdamW on fp32 masters (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019),
// torch's order: decay first, bias corrections in double.
//
// Over several ranks with copies of one model each rank adds the gradients of its part of the
// numbers (parallel/flat_slices.h), holds their moments, steps them and tells them to the others
// (ZeRO-1): 8 / n bytes of moments per parameter, and the numbers of one process. Where a copy of
// the model lies in parts on several ranks, each steps its parts, and the norm is that of all.
// Experts that are dealt out are shared like that among the ranks that hold the same ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/parallel/flat_slices.h"

namespace banyan::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// L2 norm of all gradients, summed in fp64 in parameter order: the same bits for any thread count.
// Numbers that another rank counts (Param::is_copy) are left out.
double grad_norm(const ParamTable& params);

class AdamW {
 public:
  // `ranks` hold copies of the model and call every function marked (all) together; null: this
  // process alone.
  // `model` are the ranks that hold the other parts of this copy of the model; null: all is here.
  // `experts`: ranks that hold the same dealt-out experts (Param::is_dealt).
  AdamW(ParamTable& params,
        const AdamWOptions& options,
        parallel::Collectives* ranks = nullptr,
        parallel::Collectives* model = nullptr,
        parallel::Collectives* experts = nullptr);

  bool is_sharded() const { return ranks_ != nullptr; }
  // For parameters that are one rank's part of a model (parallel/fsdp.h): the norm is that of the
  // parts of all these ranks; whoever has the parts has summed their gradients.
  void norm_over(parallel::Collectives* ranks) { norm_ranks_ = ranks; }
  // (all) Gradients of own numbers <- their sums over the ranks. Nothing for one process.
  void reduce_gradients();
  // (all) Global L2 norm; of reduced gradients over several ranks.
  double grad_norm();

  // w <- w - lr wd w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) with g scaled by
  // `grad_scale` (1, or the clip factor). Repacks are the caller's. (all)
  void step(double lr, double grad_scale);

  // Called in each step once a parameter and its moments are done with (train/offload.h).
  void on_stepped(std::function<void(const Param&)> stepped) { stepped_ = std::move(stepped); }

  int64_t num_steps() const { return num_steps_; }
  // State for checkpoints, whole; order of the ParamTable. Over several ranks it is there between
  // gather_moments (all), or make_moments (zeros, to be filled), and take_moments, which keeps own
  // numbers. For one process it always is, and the three do nothing.
  std::vector<at::Tensor>& first_moments() { return is_sharded() ? whole_m_ : m_; }
  std::vector<at::Tensor>& second_moments() { return is_sharded() ? whole_v_ : v_; }
  void gather_moments();
  void make_moments();
  void take_moments();
  void set_num_steps(int64_t steps) { num_steps_ = steps; }
  // The memory that this rank's moments lie in, always there.
  std::vector<at::Tensor> held_moments() const;

 private:
  // Parameters of which `ranks` hold copies, and who of them owns which numbers.
  struct Copies {
    parallel::Collectives* ranks;
    std::vector<size_t> params;
    parallel::FlatSlices slices;
  };
  void share_out(parallel::Collectives& ranks, bool dealt);

  ParamTable& params_;
  parallel::Collectives* ranks_ = nullptr;
  parallel::Collectives* norm_ranks_ = nullptr;
  parallel::Collectives* model_ = nullptr;
  std::vector<Copies> copies_;        // over several ranks: common parameters, and dealt-out ones
  std::vector<parallel::Range> own_;  // what this rank steps; one process: every parameter
  AdamWOptions options_;
  int64_t num_steps_ = 0;
  std::vector<at::Tensor> m_;  // per range of own_; one process: shaped as the parameter
  std::vector<at::Tensor> v_;
  std::vector<at::Tensor> whole_m_;
  std::vector<at::Tensor> whole_v_;
  std::function<void(const Param&)> stepped_;
};

}  // namespace banyan::optim
