// Wall-clock stages of a step.
#pragma once

#include <chrono>

namespace banyan::train {

class Clock {
 public:
  // Seconds since construction or the last lap.
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace banyan::train
