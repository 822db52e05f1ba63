#include "banyan/rollout/control/spill_costs.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "banyan/rollout/memory/kv_budget.h"

namespace banyan::rollout {

int32_t host_pages(int64_t host_kv_bytes,
                   int32_t num_pages,
                   int64_t page_bytes,
                   at::Device device) {
  int64_t pages = host_kv_bytes / page_bytes;
  if (host_kv_bytes < 0) {
    if (device.is_cpu()) return 0;
    pages = std::min<int64_t>(num_pages, read_memory(at::kCPU).free / 4 / page_bytes);
  }
  return static_cast<int32_t>(std::min<int64_t>(pages, std::numeric_limits<int32_t>::max() / 2));
}

void SpillMeter::measure_copies(ops::KvPool& pool) {
  constexpr int32_t kCopies = 8;
  pool.spill_page(0, 0);  // allocates the place
  const auto start = std::chrono::steady_clock::now();
  for (int32_t i = 0; i < kCopies; ++i) pool.spill_page(0, 0);  // returns when it is there
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  costs_.bytes_per_second =
      static_cast<double>(kCopies * pool.page_bytes()) / std::max(seconds, 1e-9);
}

void SpillMeter::add_pass(int32_t num_tokens, int32_t num_prompt_tokens, double seconds) {
  if (2 * num_prompt_tokens <= num_tokens) return;
  seconds_ += seconds;
  num_tokens_ += num_tokens;
  costs_.seconds_per_token = seconds_ / static_cast<double>(num_tokens_);
}

}  // namespace banyan::rollout
