// Where and how tensors are computed.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace banyan {

// banyan.kernels: `native` uses our CPU kernels where they exist (bf16 on a CPU); `aten` uses plain
// LibTorch operators for everything and so runs on any device. Both give the same result within
// rounding.
enum class Kernels { kNative, kAten };

// How a model's weights and activations are held.
struct ComputeOptions {
  at::ScalarType dtype = at::kBFloat16;  // kBFloat16, kFloat or kDouble
  at::Device device = at::kCPU;
  Kernels kernels = Kernels::kNative;
};

// From the words of keys and arguments: "bfloat16" or "bf16", "float32" or "fp32", "float64" or
// "fp64"; a torch device; "native" or "aten". Throws [compute] naming the word.
ComputeOptions compute_options(const std::string& dtype,
                               const std::string& device,
                               const std::string& kernels);

// True where the native kernels take over: kernels == kNative, CPU, bf16.
bool is_native(const ComputeOptions& options);

}  // namespace banyan
