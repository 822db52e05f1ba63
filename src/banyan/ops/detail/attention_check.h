// Checks that both attention contexts make on q, k and v.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"
#include "banyan/kernels/cpu/attention.h"

namespace banyan::ops::detail {

// Throws [tag] unless q is [num_tokens, H, D], k and v are [num_tokens, K, D] with H a multiple of
// K, all of options.dtype, and, for the native kernels, D even.
void check_attention_inputs(const char* tag,
                            int64_t num_tokens,
                            const at::Tensor& q,
                            const at::Tensor& k,
                            const at::Tensor& v,
                            const ComputeOptions& options);

inline kernels::AttentionShape attention_shape(const at::Tensor& q,
                                               const at::Tensor& k,
                                               double scale) {
  return {.num_heads = q.size(1),
          .num_kv_heads = k.size(1),
          .head_dim = q.size(2),
          .scale = static_cast<float>(scale)};
}

}  // namespace banyan::ops::detail
