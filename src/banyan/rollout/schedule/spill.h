// Whether pages that must leave a device are worth a place in host memory. Torch-free.
#pragma once

#include <cstdint>

#include "banyan/rollout/schedule/options.h"

namespace banyan::rollout {

// pages * page_bytes / bandwidth < tokens * prefill cost. Never while a cost is unknown.
inline bool worth_spilling(const SpillCosts& costs,
                           int64_t num_pages,
                           int64_t page_bytes,
                           int64_t num_tokens) {
  if (costs.bytes_per_second <= 0.0 || costs.seconds_per_token <= 0.0) return false;
  return static_cast<double>(num_pages * page_bytes) / costs.bytes_per_second <
         static_cast<double>(num_tokens) * costs.seconds_per_token;
}

}  // namespace banyan::rollout
