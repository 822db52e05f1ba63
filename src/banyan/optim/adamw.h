// AdamW on fp32 masters (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019),
// torch's order: decay first, bias corrections in double.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "banyan/core/param.h"

namespace banyan::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// Global L2 norm of all gradients, summed in fp64 in parameter order: the same bits for any thread
// count.
double grad_norm(const ParamTable& params);

class AdamW {
 public:
  AdamW(ParamTable& params, const AdamWOptions& options);

  // w <- w - lr wd w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) with g scaled by
  // `grad_scale` (1, or the clip factor). Repacks are the caller's.
  void step(double lr, double grad_scale);

  // Called in each step once a parameter and its moments are done with (train/offload.h).
  void on_stepped(std::function<void(const Param&)> stepped) { stepped_ = std::move(stepped); }

  int64_t num_steps() const { return num_steps_; }
  // State for checkpoints; order of the ParamTable.
  std::vector<at::Tensor>& first_moments() { return m_; }
  std::vector<at::Tensor>& second_moments() { return v_; }
  void set_num_steps(int64_t steps) { num_steps_ = steps; }

 private:
  ParamTable& params_;
  AdamWOptions options_;
  int64_t num_steps_ = 0;
  std::vector<at::Tensor> m_;
  std::vector<at::Tensor> v_;
  std::function<void(const Param&)> stepped_;
};

}  // namespace banyan::optim
