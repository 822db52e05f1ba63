#include "banyan/rollout/control/memory_release.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/version.h>

#include <utility>

#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/rollout/memory/kv_budget.h"
#include "banyan/rollout/request.h"

namespace banyan::rollout {
namespace {

constexpr double kExpectedShare = 0.9;
constexpr int64_t kEnds = 2 * 4096;  // the pages at the ends of a block are shared with other data

void check_freed(int64_t freed, int64_t planned, int64_t allowance) {
  if (static_cast<double>(freed + allowance) >= kExpectedShare * static_cast<double>(planned)) {
    return;
  }
  throw RequestError(500,
                     "",
                     detail::concat("[rollout] sleep: wanted to give ",
                                    planned,
                                    " bytes back to the system, ",
                                    freed,
                                    " came back; somebody still holds the memory"));
}

void empty_device_cache() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  at::accelerator::emptyCache();
#endif
}

}  // namespace

int64_t release_memory(std::vector<c10::Storage> memory, c10::Device device) {
  if (!device.is_cpu()) {
    int64_t planned = 0;
    for (const c10::Storage& storage : memory) planned += static_cast<int64_t>(storage.nbytes());
    const int64_t before = read_memory(device).free;
    memory.clear();
    empty_device_cache();
    const int64_t freed = read_memory(device).free - before;
    check_freed(freed, planned, 0);
    return freed;
  }
  int64_t planned = 0;
  int64_t freed = 0;
  const int64_t allowance = kEnds * static_cast<int64_t>(memory.size());
  for (const c10::Storage& storage : memory) {
    const auto resident = [&] { return resident_bytes_of(storage.data(), storage.nbytes()); };
    const int64_t before = resident();
    if (storage.use_count() == 1) discard(storage.mutable_data(), storage.nbytes());
    planned += before;
    freed += before - resident();  // looked at before the allocator has it, and others from that
  }
  memory.clear();
  release_freed_memory();
  check_freed(freed, planned, allowance);
  return freed;
}

void check_free_memory(const std::string& what, int64_t num_bytes, int64_t free_bytes) {
  if (free_bytes <= 0 || num_bytes <= free_bytes) return;
  throw RequestError(503,
                     "",
                     detail::concat(what,
                                    " wants ",
                                    num_bytes,
                                    " bytes, ",
                                    free_bytes,
                                    " are free; let the trainer give its memory back first"),
                     /*retry_after=*/1.0);
}

}  // namespace banyan::rollout
