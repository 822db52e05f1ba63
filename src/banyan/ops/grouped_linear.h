// Grouped GEMM: rows of several experts, each expert's rows times its own weight. Rows of expert e
// are [offsets[e], offsets[e + 1]); an expert may have none. A row has the bits that
// ops/linear.h gives it in any batch (native kernels).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/ops/linear.h"

namespace banyan::ops {

// One weight of each expert, all of one shape [out, in].
using ExpertWeights = std::vector<const LinearWeight*>;

// x [S, in] -> [S, out].
at::Tensor grouped_linear_forward(const at::Tensor& x,
                                  const std::vector<int64_t>& offsets,
                                  const ExpertWeights& weights);

// dy [S, out] -> dx [S, in].
at::Tensor grouped_linear_backward_input(const at::Tensor& dy,
                                         const std::vector<int64_t>& offsets,
                                         const ExpertWeights& weights);

// grads[e] [out, in] fp32 (fp64) += dyᵀ x over the rows of e, as linear_backward_weight.
void grouped_linear_backward_weight(const at::Tensor& dy,
                                    const at::Tensor& x,
                                    const std::vector<int64_t>& offsets,
                                    const std::vector<at::Tensor*>& grads,
                                    const ComputeOptions& options);

}  // namespace banyan::ops
