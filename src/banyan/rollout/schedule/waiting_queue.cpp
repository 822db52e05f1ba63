#include "banyan/rollout/schedule/waiting_queue.h"

#include <algorithm>

namespace banyan::rollout {

bool WaitingQueue::before(const Group& a, const Group& b) const {
  if (policy_ == SchedulingPolicy::kPriority && a.request.priority != b.request.priority) {
    return a.request.priority < b.request.priority;
  }
  if (a.place() != b.place()) return a.place() < b.place();
  return a.arrival < b.arrival;
}

void WaitingQueue::push(const Group& group) {
  const auto place =
      std::upper_bound(groups_.begin(), groups_.end(), &group, [&](const Group* a, const Group* b) {
        return before(*a, *b);
      });
  groups_.insert(place, &group);
  prompt_tokens_ += group.prompt_length();
}

void WaitingQueue::erase(const Group& group) {
  const auto place = std::find(groups_.begin(), groups_.end(), &group);
  if (place == groups_.end()) return;
  groups_.erase(place);
  prompt_tokens_ -= group.prompt_length();
}

void WaitingQueue::sort_by_arrival() {
  std::sort(groups_.begin(), groups_.end(), [&](const Group* a, const Group* b) {
    return before(*a, *b);
  });
}

void WaitingQueue::sort_longest_first(const std::function<int32_t(const Group&)>& expected) {
  std::vector<std::pair<int32_t, const Group*>> keyed;
  keyed.reserve(groups_.size());
  for (const Group* group : groups_) keyed.emplace_back(expected(*group), group);
  std::sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    if (a.first != b.first) return a.first > b.first;
    if (a.second->path != b.second->path) return a.second->path < b.second->path;
    return before(*a.second, *b.second);
  });
  for (size_t i = 0; i < keyed.size(); ++i) groups_[i] = keyed[i].second;
}

}  // namespace banyan::rollout
