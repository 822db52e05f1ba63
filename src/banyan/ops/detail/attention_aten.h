// Attention in plain LibTorch operators, for any dtype and device: the reference beside the native
// kernels and the first path on an accelerator. Arithmetic in fp32 (fp64 for fp64), without
// autograd.
#pragma once

#include <ATen/core/Tensor.h>

namespace banyan::ops::detail {

// The last n of L path positions attend: q [n, H, D], k and v [L, K, D], causal at the end. Writes
// out [n, H, D] in q's dtype and lse [n, H] in the accumulate type.
struct DenseAttention {
  at::Tensor out;
  at::Tensor lse;
};
DenseAttention dense_attention(const at::Tensor& q,
                               const at::Tensor& k,
                               const at::Tensor& v,
                               double scale);

// Gradients of dense_attention in the accumulate type: dq [n, H, D], dk and dv [L, K, D].
struct DenseAttentionGradients {
  at::Tensor dq;
  at::Tensor dk;
  at::Tensor dv;
};
DenseAttentionGradients dense_attention_backward(const at::Tensor& grad_out,
                                                 const at::Tensor& q,
                                                 const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 const at::Tensor& out,
                                                 const at::Tensor& lse,
                                                 double scale);

}  // namespace banyan::ops::detail
