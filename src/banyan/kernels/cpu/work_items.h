// Dynamic work sharing with results that do not depend on it: items are handed out in ascending
// order, each writes outputs of its own.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace banyan::kernels {

// Calls work(next) on up to `threads` threads; `next()` yields the next item, or -1 when none is
// left. So a thread that is held up, or whose items are larger, gets fewer of them.
template <typename Work>
void for_each_item(int64_t num_items, int64_t threads, const Work& work) {
  std::atomic<int64_t> counter{0};
  const auto next = [&]() -> int64_t {
    const int64_t item = counter.fetch_add(1, std::memory_order_relaxed);
    return item < num_items ? item : -1;
  };
  const int64_t workers = std::min(threads, num_items);
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) work(next);
  });
}

// The same on up to at::get_num_threads() threads.
template <typename Work>
void for_each_item(int64_t num_items, const Work& work) {
  for_each_item(num_items, at::get_num_threads(), work);
}

// Carves arrays out of one block, each on a cache line of its own. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace banyan::kernels
