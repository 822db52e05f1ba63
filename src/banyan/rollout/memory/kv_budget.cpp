#include "banyan/rollout/memory/kv_budget.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "banyan/core/error.h"
#include "banyan/core/memory.h"

namespace banyan::rollout {
namespace {

// "MemAvailable:  123 kB" in /proc/meminfo.
int64_t meminfo_bytes(const std::string& field) {
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    int64_t kilobytes = 0;
    if (word == field && meminfo >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

// The number in a file; -1 if there is none ("max").
int64_t number_in(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

// The control group's limit and use (version 2, then 1); a limit of -1 where there is none.
std::pair<int64_t, int64_t> control_group_bytes() {
  const int64_t limit2 = number_in("/sys/fs/cgroup/memory.max");
  const int64_t used2 = number_in("/sys/fs/cgroup/memory.current");
  if (limit2 >= 0 && used2 >= 0) return {limit2, used2};
  const int64_t limit1 = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  const int64_t used1 = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes");
  if (limit1 >= 0 && used1 >= 0) return {limit1, used1};
  return {-1, 0};
}

}  // namespace

MemoryReading read_memory(at::Device device) {
  MemoryReading memory;
  if (device.is_cpu()) {
    memory.total = meminfo_bytes("MemTotal:");
    memory.free = meminfo_bytes("MemAvailable:");
    memory.resident = resident_bytes();
    const auto [limit, used] = control_group_bytes();
    if (limit >= 0) {
      memory.total = std::min(memory.total, limit);
      memory.free = std::min(memory.free, std::max<int64_t>(0, limit - used));
    }
    return memory;
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  const auto [free, total] = at::accelerator::getMemoryInfo(device.index());
  memory.free = static_cast<int64_t>(free);
  memory.total = static_cast<int64_t>(total);
#endif
  return memory;
}

int64_t kv_budget_bytes(const KvBudget& budget, const MemoryReading& memory, bool is_cpu) {
  if (budget.kv_bytes > 0) return budget.kv_bytes;
  if (memory.total == 0) return 0;
  const bool by_fraction = budget.mem_fraction_static > 0.0;
  const double share = by_fraction ? budget.mem_fraction_static : budget.memory_share;
  const double total = static_cast<double>(memory.total);
  const double bytes = is_cpu && !by_fraction
                           ? share * (total - static_cast<double>(memory.resident))
                           : share * total - static_cast<double>(budget.weight_bytes);
  BANYAN_CHECK(bytes > 0.0,
               "[rollout] ",
               by_fraction ? "mem_fraction_static" : "gpu_memory_utilization",
               ": wanted a share that leaves room for keys and values, got ",
               share,
               " of ",
               memory.total,
               " bytes with ",
               is_cpu && !by_fraction ? memory.resident : budget.weight_bytes,
               is_cpu && !by_fraction ? " used by this process" : " of weights");
  return static_cast<int64_t>(std::min(bytes, 0.9 * static_cast<double>(memory.free)));
}

int32_t pool_pages(int64_t wanted_pages,
                   int64_t page_bytes,
                   const KvBudget& budget,
                   at::Device device) {
  constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max() / 2;
  const MemoryReading memory = budget.kv_bytes > 0 ? MemoryReading{} : read_memory(device);
  int64_t most = kMaxPages;
  // Where nobody knows the memory: take what is wanted, the allocator has the last word.
  if (budget.kv_bytes > 0 || memory.total > 0) {
    most = kv_budget_bytes(budget, memory, device.is_cpu()) / page_bytes;
  }
  return static_cast<int32_t>(std::min({wanted_pages, most, kMaxPages}));
}

}  // namespace banyan::rollout
