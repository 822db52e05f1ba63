// SwiGLU: y = silu(gate) * up (Shazeer, "GLU variants improve transformer", 2020). gate and up are
// the two halves of one row, as the fused projection writes them.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"

namespace banyan::ops {

// gate_up [T, 2F] -> [T, F], fp32 arithmetic with one rounding.
at::Tensor swiglu_forward(const at::Tensor& gate_up, const ComputeOptions& options);

struct SwigluGradients {
  at::Tensor gate_up;  // [T, 2F]
  at::Tensor y;        // [T, F]: what the forward gave, which a weight gradient wants
};
// dy [T, F] -> d(gate_up), and y again in the same pass. The results take the memory of gate_up and
// dy where the caller hands these over (std::move) and nobody else holds them.
SwigluGradients swiglu_backward(at::Tensor dy, at::Tensor gate_up, const ComputeOptions& options);

}  // namespace banyan::ops
