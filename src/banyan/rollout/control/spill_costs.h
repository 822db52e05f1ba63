// What it costs to move a page to host memory and what to compute its tokens again: measured, for
// the schedule to choose between the two (schedule/spill.h).
#pragma once

#include <cstdint>

#include "banyan/ops/paged_attention.h"
#include "banyan/rollout/schedule/options.h"

namespace banyan::rollout {

// Places for pages in host memory: `host_kv_bytes` of them, or with -1 beside an accelerator as
// many as the pool has pages, within a quarter of the host's free memory, and none on a CPU.
int32_t host_pages(int64_t host_kv_bytes, int32_t num_pages, int64_t page_bytes, at::Device device);

class SpillMeter {
 public:
  // Times the copies of a page of the pool, which nobody uses yet.
  void measure_copies(ops::KvPool& pool);
  // A pass took so long; `num_prompt_tokens` of its tokens were prefill.
  void add_pass(int32_t num_tokens, int32_t num_prompt_tokens, double seconds);
  const SpillCosts& costs() const { return costs_; }

 private:
  SpillCosts costs_;
  double seconds_ = 0.0;  // of passes that were mostly prefill
  int64_t num_tokens_ = 0;
};

}  // namespace banyan::rollout
