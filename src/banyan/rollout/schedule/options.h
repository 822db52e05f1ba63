// What the scheduler may be told. Torch-free.
#pragma once

#include <cstdint>
#include <functional>

#include "banyan/rollout/schedule/policy.h"

namespace banyan::rollout {

// What a spill to host memory costs against computing again. Measured by whoever owns the device.
struct SpillCosts {
  double bytes_per_second = 0.0;   // one way between device and host
  double seconds_per_token = 0.0;  // of prefill
};

struct SchedulerOptions {
  int32_t max_num_seqs = 256;                // running responses
  int32_t max_num_batched_tokens = 2048;     // tokens of one pass
  bool share_prefix = true;                  // false: the tree matches nothing
  bool chunked_prefill = true;               // false: a prompt is computed in one pass
  int32_t long_prefill_token_threshold = 0;  // most tokens of one prompt in a pass; 0: the pass
  int32_t prefill_schedule_interval = 1;  // prompts are computed every so many passes (always where
                                          // nothing decodes)
  double watermark = 0.0;                 // share of the pages kept free at admission
  double conservativeness = 1.0;          // times the expected length of a response
  SchedulingPolicy policy = SchedulingPolicy::kGroup;
  double starve_seconds = 2.0;    // see kGroup
  int64_t page_bytes = 0;         // of the pool: for messages and for the cost of a spill
  int32_t host_pages = 0;         // pages that fit in host memory beside a device; 0: never spill
  std::function<double()> now{};  // seconds on a monotone clock; empty: the machine's
};

}  // namespace banyan::rollout
