// How many bytes the KV pool may take.
//
//   kv_bytes                 that many
//   mem_fraction_static      fraction * total - weights (SGLang: weights and KV together)
//   gpu_memory_utilization   on a CPU share * (total - resident): what the machine, or the control
//                            group, allows and this process does not use yet; on an accelerator
//                            share * total - weights (vLLM: the engine's part of the device)
//
// and, unless given in bytes, never more than nine tenths of what is free at this moment.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace banyan::rollout {

struct MemoryReading {
  int64_t total = 0;     // of the device; on a CPU of the machine or its control group; 0: unknown
  int64_t free = 0;      // could be taken now
  int64_t resident = 0;  // used by this process (CPU)
};

MemoryReading read_memory(at::Device device);

struct KvBudget {
  int64_t kv_bytes = 0;              // 0: by share
  double memory_share = 0.5;         // gpu_memory_utilization
  double mem_fraction_static = 0.0;  // 0: not given; else it decides
  int64_t weight_bytes = 0;          // of the model, in the form that the engine computes with
};

// 0 if nobody knows the memory. Throws [rollout] if weights or process leave nothing of the share.
int64_t kv_budget_bytes(const KvBudget& budget, const MemoryReading& memory, bool is_cpu);

// Pages of the pool: as many as can be used, within the budget.
int32_t pool_pages(int64_t wanted_pages,
                   int64_t page_bytes,
                   const KvBudget& budget,
                   at::Device device);

}  // namespace banyan::rollout
