// A projection y = x Wᵀ (+ b), of one matrix or of several with the same input that are computed as
// one.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "banyan/kernels/cpu/decoder_pass.h"
#include "banyan/nn/weight.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::nn {

class Linear {
 public:
  // `parts` carry HF module names ("...self_attn.q_proj"): ".weight" and ".bias" are added here.
  Linear(ParamTable& table,
         const std::vector<Weight::Part>& parts,
         int64_t in,
         bool bias,
         const ComputeOptions& options,
         bool with_backward);

  // [T, in] -> [T, out], plus the residual [T, out] if there is one.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {}) const;

  // The same for a matrix whose columns lie on several ranks: the products of all are added, then
  // the bias and the residual, of own rows (TensorParallel::sum_rows). Null: forward.
  at::Tensor forward_summed(const parallel::TensorParallel* tensor,
                            const at::Tensor& x,
                            const at::Tensor& residual) const;

  // What the native kernels multiply by; borrowed, good until the next repack that allocates.
  kernels::PassProduct product() const;

  // dy [T, out] and the x of forward -> dx [T, in]; adds the gradients of weight and bias.
  at::Tensor backward(const at::Tensor& dy, const at::Tensor& x);
  // The two halves of that, for an x that is made from dx.
  at::Tensor backward_input(const at::Tensor& dy) const;
  void backward_weight(const at::Tensor& dy, const at::Tensor& x);

 private:
  ComputeOptions options_;
  Weight weight_;
  std::unique_ptr<Vector> bias_;
};

}  // namespace banyan::nn
