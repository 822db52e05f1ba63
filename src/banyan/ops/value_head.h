// Values of hidden rows: a linear head with one output, kept in the master's precision.
//   v_r = sum_e h_re w_e + b,   dh_re = g_r w_e,   dw_e = sum_r g_r h_re,   db = sum_r g_r
// Sums run in fp64 in a fixed order (a row by columns, a weight by rows), so the bits of a value do
// not depend on its batch and those of a gradient not on the thread count.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"

namespace banyan::ops {

// The head's masters; they are read as they are, there is no other compute form.
struct ValueHeadWeight {
  at::Tensor weight;  // [1, E] fp32 (fp64 for a fp64 model)
  at::Tensor bias;    // [1] likewise, or undefined
};

// hidden [R, E] compute dtype -> values [R] in the weight's dtype.
at::Tensor value_head_forward(const at::Tensor& hidden, const ValueHeadWeight& head);

// grad_value [R] -> d(hidden) [R, E] in hidden's dtype; adds to grad_weight [1, E] and, with a
// bias, to grad_bias [1].
at::Tensor value_head_backward(const at::Tensor& hidden,
                               const ValueHeadWeight& head,
                               const at::Tensor& grad_value,
                               at::Tensor& grad_weight,
                               const at::Tensor& grad_bias);

}  // namespace banyan::ops
