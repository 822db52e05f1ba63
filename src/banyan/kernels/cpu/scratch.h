// Grow-only, 64-byte aligned working memory. Kernels keep one per thread (thread_local inside the
// function that uses it), so nothing is allocated once shapes have been seen. The content is not
// kept between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "banyan/kernels/cpu/huge_pages.h"

namespace banyan::kernels {

class Scratch {
 public:
  // Room for `count` values of T, uninitialised.
  template <typename T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > bytes_) {
      data_.reset();  // before the new buffer, so that the two never stand together
      data_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      advise_huge_pages(data_.get(), bytes);
      bytes_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace banyan::kernels
