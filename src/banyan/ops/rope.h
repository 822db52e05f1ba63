// Rotary position embedding, half-split form: y = x cos + rot(x) sin, rot(x) = [-x2, x1] over the
// halves of D (Su et al., "RoFormer", 2021; models spec section 1).
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"

namespace banyan::ops {

// x [T, H, D]; positions [T] int32; cos, sin [P, D/2] fp32 (fp64 for fp64) tables indexed by
// position id, any attention factor already multiplied in. Throws [rope] if a position is outside
// the table. Returns a new tensor; the arithmetic is fp32 with one rounding to x's dtype.
at::Tensor rope_forward(const at::Tensor& x,
                        const at::Tensor& positions,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        const ComputeOptions& options);
// In `out` like x, which may be x.
void rope_forward_into(const at::Tensor& x,
                       const at::Tensor& positions,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       const ComputeOptions& options,
                       at::Tensor& out);

// The transpose of the rotation (sin negated), in a new tensor or in `out` like dy.
at::Tensor rope_backward(const at::Tensor& dy,
                         const at::Tensor& positions,
                         const at::Tensor& cos,
                         const at::Tensor& sin,
                         const ComputeOptions& options);
void rope_backward_into(const at::Tensor& dy,
                        const at::Tensor& positions,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        const ComputeOptions& options,
                        at::Tensor& out);

}  // namespace banyan::ops
