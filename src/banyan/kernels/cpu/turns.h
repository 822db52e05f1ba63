// The order in which threads add to one place: each waits for its turn there.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace banyan::kernels {

// Whose turn it is at each of `num_tiles` places. Work must be handed out so that the one a thread
// waits for is running or done.
class Turns {
 public:
  explicit Turns(int64_t num_tiles) : at_(new std::atomic<int32_t>[num_tiles]) {}

  void reset(int64_t tile) { at_[tile].store(0, std::memory_order_relaxed); }

  void wait(int64_t tile, int32_t turn) const {
    for (int spins = 0; at_[tile].load(std::memory_order_acquire) != turn; ++spins) {
      if (spins > 256) std::this_thread::yield();
    }
  }

  void pass(int64_t tile, int32_t turn) { at_[tile].store(turn + 1, std::memory_order_release); }

 private:
  std::unique_ptr<std::atomic<int32_t>[]> at_;
};

}  // namespace banyan::kernels
