// Groups that were never admitted, in the order in which they should be. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "banyan/rollout/schedule/policy.h"
#include "banyan/rollout/schedule/sequence.h"

namespace banyan::rollout {

class WaitingQueue {
 public:
  explicit WaitingQueue(SchedulingPolicy policy) : policy_(policy) {}

  // Borrows the group until it is erased.
  void push(const Group& group);
  // No effect if the group is not here.
  void erase(const Group& group);
  // Longest expected response first, then neighbours in the prefix tree, then arrival.
  void sort_longest_first(const std::function<int32_t(const Group&)>& expected);
  // By arrival (a unit by that of its first), or by priority: what push keeps.
  void sort_by_arrival();

  // In order.
  const std::vector<const Group*>& groups() const { return groups_; }
  int32_t size() const { return static_cast<int32_t>(groups_.size()); }
  int64_t prompt_tokens() const { return prompt_tokens_; }

 private:
  bool before(const Group& a, const Group& b) const;

  SchedulingPolicy policy_;
  std::vector<const Group*> groups_;
  int64_t prompt_tokens_ = 0;
};

}  // namespace banyan::rollout
