#include "banyan/core/device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <optional>

#include "banyan/core/error.h"

namespace banyan {
namespace {

at::ScalarType dtype_of(const std::string& word) {
  if (word == "bfloat16" || word == "bf16") return at::kBFloat16;
  if (word == "float32" || word == "fp32") return at::kFloat;
  BANYAN_CHECK(word == "float64" || word == "fp64",
               "[compute] dtype: wanted bfloat16 (bf16), float32 (fp32) or float64 (fp64), got '",
               word,
               "'");
  return at::kDouble;
}

bool is_there(const at::Device& device) {
  if (device.is_cpu()) return true;
  return c10::impl::hasDeviceGuardImpl(device.type()) &&
         c10::impl::getDeviceGuardImpl(device.type())->deviceCount() > 0;
}

at::Device device_of(const std::string& word) {
  std::optional<at::Device> device;
  try {
    device.emplace(word);
  } catch (const c10::Error&) {  // a word that this LibTorch does not know
  }
  BANYAN_CHECK(
      device && is_there(*device),
      "[compute] device: wanted one that LibTorch finds on this machine, such as cpu, got '",
      word,
      "'");
  return *device;
}

}  // namespace

ComputeOptions compute_options(const std::string& dtype,
                               const std::string& device,
                               const std::string& kernels) {
  BANYAN_CHECK(kernels == "native" || kernels == "aten",
               "[compute] kernels: wanted native or aten, got '",
               kernels,
               "'");
  return {.dtype = dtype_of(dtype),
          .device = device_of(device),
          .kernels = kernels == "native" ? Kernels::kNative : Kernels::kAten};
}

bool is_native(const ComputeOptions& options) {
  return options.kernels == Kernels::kNative && options.device.is_cpu() &&
         options.dtype == at::kBFloat16;
}

}  // namespace banyan
