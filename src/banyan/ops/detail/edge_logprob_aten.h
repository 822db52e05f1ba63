// The head in plain LibTorch operators: reference of the native kernels and the path of fp32, fp64
// and other devices. Rows are handled kRowsPerChunk at a time, so [rows, V] arrays stay small.
// Contracts: edge_logprob.h.
#pragma once

#include "banyan/ops/edge_logprob.h"

namespace banyan::ops::aten {

EdgeLogprob edge_logprob_forward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 double temperature,
                                 bool with_entropy);

at::Tensor edge_logprob_backward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 const EdgeLogprob& forward,
                                 const at::Tensor& grad_logprob,
                                 const at::Tensor& grad_entropy,
                                 double temperature,
                                 at::Tensor& grad_head);

at::Tensor head_logits(const at::Tensor& hidden, const LinearWeight& head);

at::Tensor logits_logprob(const at::Tensor& logits, const at::Tensor& token, double temperature);

}  // namespace banyan::ops::aten
