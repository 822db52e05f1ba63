// RMSNorm, rule N1 (models spec section 1): y = w * cast(x * rsqrt(mean(x²) + eps)), statistics in
// fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"

namespace banyan::ops {

// x [..., E], weight [E] in x's dtype -> y like x. Per-row bits depend on the row alone.
at::Tensor rms_norm_forward(const at::Tensor& x,
                            const at::Tensor& weight,
                            double eps,
                            const ComputeOptions& options);

// dx, plus the residual like dy if there is one (the gradient that went past the norm); grad_weight
// [E] fp32 (fp64 for fp64) += in fixed row order. The statistics are recomputed from x.
at::Tensor rms_norm_backward(const at::Tensor& dy,
                             const at::Tensor& x,
                             const at::Tensor& weight,
                             double eps,
                             at::Tensor& grad_weight,
                             const ComputeOptions& options,
                             const at::Tensor& residual = {});

}  // namespace banyan::ops
