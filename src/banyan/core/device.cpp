#include "banyan/core/device.h"

namespace banyan {

bool is_native(const ComputeOptions& options) {
  return options.kernels == Kernels::kNative && options.device.is_cpu() &&
         options.dtype == at::kBFloat16;
}

}  // namespace banyan
