#include "banyan/rollout/control/boundary.h"

#include <algorithm>

namespace banyan::rollout {
namespace {

constexpr double kYear = 365.0 * 86400.0;

}  // namespace

Deadline::Deadline(double seconds)
    : seconds_(seconds),
      at_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                             seconds > 0.0 ? std::min(seconds, kYear) : 0.0))) {}

Boundary::Hold Boundary::enter_pass() {
  std::unique_lock<std::mutex> lock(mutex_);
  left_.wait(lock, [&] { return !held_ && num_waiting_ == 0; });
  held_ = true;
  return Hold(this);
}

std::optional<Boundary::Hold> Boundary::enter(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_waiting_;
  const bool free = left_.wait_until(lock, deadline.at(), [&] { return !held_; });
  --num_waiting_;
  if (!free) {
    lock.unlock();
    left_.notify_all();  // a pass may have waited for this call alone
    return std::nullopt;
  }
  held_ = true;
  return Hold(this);
}

int32_t Boundary::num_waiting() const {
  const std::unique_lock<std::mutex> lock(mutex_);
  return num_waiting_;
}

void Boundary::leave() {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    held_ = false;
  }
  left_.notify_all();
}

}  // namespace banyan::rollout
