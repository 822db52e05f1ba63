// y = x Wᵀ + b and its gradients.
//
// Native (bf16, CPU): packed GEMM over brgemm with fixed tiles; each output element is one dot
// product over the whole K in one order, so the bits of a row do not depend on how many rows there
// are, on the thread count, or on its neighbours. aten: at::linear and at::mm on the plain weight.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"

namespace banyan::ops {

// The compute form of a weight matrix [out, in], as linear, the head and the embedding read it.
// Exactly one of the two forms is there: packed (native) or plain (aten; equals the master for fp32
// and fp64).
struct LinearWeight {
  int64_t out = 0;
  int64_t in = 0;
  at::Tensor plain;  // [out, in] compute dtype, or undefined
  at::Tensor
      packed;  // native: VNNI panels of W for y = x Wᵀ (layout: kernels/cpu/gemm.h), or undefined
  at::Tensor packed_t;  // native: VNNI panels of Wᵀ for dx = dy W, or undefined (inference only)

  bool is_packed() const { return packed.defined(); }
};

// Builds or refreshes (in place, no allocation the second time) the compute form from `master`
// [out, in]. `with_backward` also packs the transpose.
void pack_weight(const at::Tensor& master,
                 const ComputeOptions& options,
                 bool with_backward,
                 LinearWeight& weight);

// [T, in] -> [T, out], dtype of x; `bias` [out] in x's dtype, or undefined. A `residual` [T, out],
// if defined, is added to the result, which is rounded before and after.
at::Tensor linear_forward(const at::Tensor& x,
                          const LinearWeight& weight,
                          const at::Tensor& bias,
                          const at::Tensor& residual = {});

// dy [T, out] -> dx [T, in].
at::Tensor linear_backward_input(const at::Tensor& dy, const LinearWeight& weight);

// grad_weight [out, in] fp32 (fp64 for fp64 inputs) += dyᵀ x; grad_bias [out] += column sums of dy,
// if defined. Fixed order of summation whatever the thread count.
void linear_backward_weight(const at::Tensor& dy,
                            const at::Tensor& x,
                            at::Tensor& grad_weight,
                            const at::Tensor& grad_bias,
                            const ComputeOptions& options);

// Rows of W (embedding): ids [T] int32 -> [T, in] in the compute dtype.
at::Tensor embedding_forward(const at::Tensor& ids, const LinearWeight& weight);

// grad_weight[ids[t]] += dy[t], summed in ascending t per row.
void embedding_backward(const at::Tensor& dy, const at::Tensor& ids, at::Tensor& grad_weight);

}  // namespace banyan::ops
