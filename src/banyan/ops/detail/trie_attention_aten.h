// Trie attention in plain LibTorch operators, for any dtype and device.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/ops/detail/attention_aten.h"
#include "banyan/trie/trie.h"

namespace banyan::ops::detail {

// Queries are tokens [num_carried, T): q [T - num_carried, H, D], k and v of all tokens, [T, K, D].
// out in q's dtype, lse in the accumulate type.
DenseAttention trie_attention_aten(const trie::Trie& trie,
                                   int64_t num_carried,
                                   const at::Tensor& q,
                                   const at::Tensor& k,
                                   const at::Tensor& v,
                                   double scale);

// dq [T - num_carried, H, D] in q's dtype; dk and dv [T, K, D] in the accumulate type, summed over
// segments in packed order.
DenseAttentionGradients trie_attention_aten_backward(const trie::Trie& trie,
                                                     int64_t num_carried,
                                                     const at::Tensor& grad_out,
                                                     const at::Tensor& q,
                                                     const at::Tensor& k,
                                                     const at::Tensor& v,
                                                     const at::Tensor& out,
                                                     const at::Tensor& lse,
                                                     double scale);

}  // namespace banyan::ops::detail
