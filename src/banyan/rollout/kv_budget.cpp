#include "banyan/rollout/kv_budget.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace banyan::rollout {
namespace {

// "MemAvailable:  123 kB" in /proc/meminfo.
int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    int64_t kilobytes = 0;
    if (word == "MemAvailable:" && meminfo >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

// The number in a file; -1 if there is none ("max").
int64_t number_in(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

// What the control group (version 2, then 1) leaves; a huge number without a limit.
int64_t control_group_bytes() {
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  const int64_t limit2 = number_in("/sys/fs/cgroup/memory.max");
  const int64_t used2 = number_in("/sys/fs/cgroup/memory.current");
  if (limit2 >= 0 && used2 >= 0) return std::max<int64_t>(0, limit2 - used2);
  const int64_t limit1 = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  const int64_t used1 = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes");
  if (limit1 >= 0 && used1 >= 0) return std::max<int64_t>(0, limit1 - used1);
  return kNoLimit;
}

}  // namespace

int64_t free_memory_bytes(at::Device device) {
  if (device.is_cpu()) return std::min(available_bytes(), control_group_bytes());
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  return static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
#else
  return 0;
#endif
}

int32_t pool_pages(int64_t wanted_pages,
                   int64_t page_bytes,
                   int64_t kv_bytes,
                   double memory_share,
                   at::Device device) {
  constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max() / 2;
  int64_t budget = kv_bytes;
  if (budget == 0) {
    budget = static_cast<int64_t>(memory_share * static_cast<double>(free_memory_bytes(device)));
    // Nobody knows the free memory: take what the call needs, the allocator has the last word.
    if (budget == 0) return static_cast<int32_t>(std::min(wanted_pages, kMaxPages));
  }
  return static_cast<int32_t>(std::min({wanted_pages, budget / page_bytes, kMaxPages}));
}

}  // namespace banyan::rollout
