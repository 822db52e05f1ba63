// Attention of one sequence in double loops, forward and backward: what every attention of banyan
// is tested against. fp64, CPU; used by tests alone.
#pragma once

#include <ATen/core/Tensor.h>

namespace banyan::ops {

struct AttentionReference {
  at::Tensor out;  // [n, H, D]
  at::Tensor lse;  // [n, H]
};

// Token i attends tokens 0..i. q [n, H, D], k and v [n, K, D], fp64, contiguous; query head h reads
// kv head h / (H / K).
AttentionReference attention_reference(const at::Tensor& q,
                                       const at::Tensor& k,
                                       const at::Tensor& v,
                                       double scale);

struct AttentionReferenceGradients {
  at::Tensor dq;
  at::Tensor dk;
  at::Tensor dv;
};
AttentionReferenceGradients attention_reference_backward(const at::Tensor& grad_out,
                                                         const at::Tensor& q,
                                                         const at::Tensor& k,
                                                         const at::Tensor& v,
                                                         double scale);

}  // namespace banyan::ops
