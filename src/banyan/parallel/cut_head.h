// The vocabulary head (ops/edge_logprob.h) where each rank holds a run of the vocabulary. A rank
// reduces its own logits; per row the log-sum-exp and entropy of its part, and per edge the logit
// of a token that it holds, are told to all and put together in rank order:
//   lse = log sum_r exp(lse_r),  l_x = z[token_x] / tau - lse,
//   H = lse - sum_r exp(lse_r - lse) (lse_r - H_r)
// Backward each rank gives its rows of the head their gradient, and a term of d(hidden).
#pragma once

#include "banyan/ops/edge_logprob.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::parallel {

// The edges as this rank's part sees them.
ops::EdgeIndex own_edges(const TensorParallel& tensor, const ops::EdgeIndex& index);

// [R, V] fp32 from the logits of this rank's part [R, own], which all ranks tell each other: bytes
// sent (n - 1) R ceil(V / n) 4.
at::Tensor whole_logits(const TensorParallel& tensor, const at::Tensor& own);

// As ops::edge_logprob_forward, with the numbers of the whole vocabulary on all ranks. `own` are
// own_edges; `token` of all edges is not needed.
ops::EdgeLogprob edge_logprob_forward(const TensorParallel& tensor,
                                      const at::Tensor& hidden,
                                      const ops::LinearWeight& head,
                                      const ops::EdgeIndex& own,
                                      double temperature,
                                      bool with_entropy,
                                      const ComputeOptions& options,
                                      ops::HeadMemory* memory = nullptr);

// As ops::edge_logprob_backward; d(hidden) is the sum over the ranks.
at::Tensor edge_logprob_backward(const TensorParallel& tensor,
                                 const at::Tensor& hidden,
                                 const ops::LinearWeight& head,
                                 const ops::EdgeIndex& own,
                                 const ops::EdgeLogprob& forward,
                                 const at::Tensor& grad_logprob,
                                 const at::Tensor& grad_entropy,
                                 double temperature,
                                 at::Tensor& grad_head,
                                 const ComputeOptions& options,
                                 ops::HeadMemory* memory = nullptr);

// As ops::sum_squared_probabilities; `lse` is of the whole vocabulary.
at::Tensor sum_squared_probabilities(const TensorParallel& tensor,
                                     const at::Tensor& hidden,
                                     const ops::LinearWeight& head,
                                     const at::Tensor& lse,
                                     double temperature,
                                     const ComputeOptions& options);

}  // namespace banyan::parallel
