// Types of the arithmetic beside the types of the data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace banyan::ops::detail {

// fp64 for fp64, else fp32.
inline at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// The bits of a contiguous bf16 tensor.
inline uint16_t* bf16_bits(const at::Tensor& x) { return static_cast<uint16_t*>(x.data_ptr()); }

}  // namespace banyan::ops::detail
