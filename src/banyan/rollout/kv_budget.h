// How many bytes the KV pool may take.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace banyan::rollout {

// Free bytes of a device: on a CPU what the kernel calls available, and not more than the control
// group leaves; on an accelerator what its allocator reports. 0 if nobody knows.
int64_t free_memory_bytes(at::Device device);

// Pages of the pool: as many as the call can use, within kv_bytes, or within `memory_share` of the
// free memory if kv_bytes is 0.
int32_t pool_pages(int64_t wanted_pages,
                   int64_t page_bytes,
                   int64_t kv_bytes,
                   double memory_share,
                   at::Device device);

}  // namespace banyan::rollout
