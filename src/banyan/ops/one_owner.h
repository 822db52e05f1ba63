// Whether a tensor may be written over.
#pragma once

#include <ATen/core/Tensor.h>

namespace banyan::ops {

// Nobody else sees what is written into it.
inline bool has_one_owner(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

}  // namespace banyan::ops
