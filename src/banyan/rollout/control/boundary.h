// The boundary between two passes: the only place where requests, pages and weights may be touched,
// by one thread at a time. The passes hold it while they run and give way to every control call
// that waits, so a control call waits for one pass at most. Torch-free.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace banyan::rollout {

// A moment after which a call gives up.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  // Times above a year are a year.
  explicit Deadline(double seconds);

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }
  double seconds() const { return seconds_; }  // that were given

 private:
  double seconds_;
  Clock::time_point at_;
};

class Boundary {
 public:
  // Holds the boundary until it is destroyed.
  class Hold {
   public:
    explicit Hold(Boundary* boundary) : boundary_(boundary) {}
    ~Hold() {
      if (boundary_) boundary_->leave();
    }
    Hold(Hold&& other) noexcept : boundary_(std::exchange(other.boundary_, nullptr)) {}
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Boundary* boundary_;
  };

  // For a pass: after every control call that waits.
  Hold enter_pass();
  // For a control call: nothing if the deadline passes first.
  std::optional<Hold> enter(const Deadline& deadline);
  // Control calls that wait; no pass begins while there is one.
  int32_t num_waiting() const;

 private:
  void leave();

  mutable std::mutex mutex_;
  std::condition_variable left_;
  bool held_ = false;
  int32_t num_waiting_ = 0;  // control calls
};

}  // namespace banyan::rollout
