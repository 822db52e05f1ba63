// Order in which waiting groups are admitted, and who gives way when pages run out. Torch-free.
#pragma once

#include <cstdint>

namespace banyan::rollout {

enum class SchedulingPolicy : uint8_t {
  // In order of arrival, a group as a whole: pages are reserved for all its responses. A later
  // group that fits may pass the head for SchedulerOptions::starve_seconds. A closed queue
  // (Scheduler::close_queue): longest expected response first, neighbours in the prefix tree
  // together.
  kGroup,
  // In order of arrival, response by response; nobody passes.
  kFcfs,
  // Lowest Request::priority first, then as kFcfs.
  kPriority,
};

}  // namespace banyan::rollout
