// Groups that were never admitted, in the order in which they should be. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/schedule/options.h"

namespace banyan::rollout {

class WaitingQueue {
 public:
  struct Entry {
    int32_t group = 0;
    int64_t arrival = 0;
    int32_t priority = 0;
    int64_t prompt_tokens = 0;
  };

  explicit WaitingQueue(SchedulingPolicy policy) : policy_(policy) {}

  void push(const Entry& entry);
  void erase(int32_t group);
  const std::vector<Entry>& entries() const { return entries_; }
  int64_t prompt_tokens() const { return prompt_tokens_; }

 private:
  SchedulingPolicy policy_;
  std::vector<Entry> entries_;
  int64_t prompt_tokens_ = 0;
};

}  // namespace banyan::rollout
