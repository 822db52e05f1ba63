// Heads of tokens as the kernels read them: those of a token side by side, tokens at any distance
// (a part of the rows of a larger tensor).
#pragma once

#include <ATen/core/Tensor.h>

namespace banyan::ops::detail {

// x [T, heads, D].
inline bool has_token_rows(const at::Tensor& x) {
  return x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2));
}

// x itself where it has token rows, else a copy.
inline at::Tensor token_rows(const at::Tensor& x) { return has_token_rows(x) ? x : x.contiguous(); }

}  // namespace banyan::ops::detail
