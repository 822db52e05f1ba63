// Bytes of the CPU tensors alive at one time, counted at LibTorch's allocator: exact, unlike
// resident memory, and without the kernels' own scratch.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace banyan::testing {

// Counts from its construction on; at most one lives at a time, and it outlives the tensors that
// it counts or leaves them to their own deleters.
class TensorBytes {
 public:
  TensorBytes() : before_(c10::GetCPUAllocator()) {
    counter().inner = before_;
    counter().reset();
    c10::SetCPUAllocator(&counter(), /*priority=*/100);
  }
  ~TensorBytes() { c10::SetCPUAllocator(before_, /*priority=*/100); }
  TensorBytes(const TensorBytes&) = delete;
  TensorBytes& operator=(const TensorBytes&) = delete;

  int64_t peak() const { return counter().peak; }

 private:
  class Counter final : public c10::Allocator {
   public:
    c10::DataPtr allocate(size_t num_bytes) override {
      c10::DataPtr data = inner->allocate(num_bytes);
      void* const where = data.get();
      if (where == nullptr) return data;
      const std::lock_guard<std::mutex> lock(mutex);
      sizes[where] = static_cast<int64_t>(num_bytes);
      live += static_cast<int64_t>(num_bytes);
      peak = std::max(peak, live);
      deleters[where] = data.get_deleter();
      return {where, data.release_context(), &Counter::release, data.device()};
    }
    void copy_data(void* to, const void* from, size_t num_bytes) const override {
      inner->copy_data(to, from, num_bytes);
    }
    void reset() {
      const std::lock_guard<std::mutex> lock(mutex);
      live = peak = 0;
      for (auto& size : sizes) size.second = 0;
    }

    c10::Allocator* inner = nullptr;
    std::mutex mutex;
    std::unordered_map<void*, int64_t> sizes;
    std::unordered_map<void*, c10::DeleterFnPtr> deleters;
    int64_t live = 0;
    int64_t peak = 0;

   private:
    // The CPU allocators' context is the address itself.
    static void release(void* where) {
      Counter& self = counter();
      c10::DeleterFnPtr deleter = nullptr;
      {
        const std::lock_guard<std::mutex> lock(self.mutex);
        self.live -= self.sizes.at(where);
        deleter = self.deleters.at(where);
        self.sizes.erase(where);
        self.deleters.erase(where);
      }
      deleter(where);
    }
  };

  static Counter& counter() {
    static Counter* const instance = new Counter;  // tensors may outlive every static
    return *instance;
  }

  c10::Allocator* before_;
};

}  // namespace banyan::testing
