// Ranges of memory that one thread will read soon, fetched piece by piece behind its arithmetic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace banyan::kernels {

class FetchQueue {
 public:
  struct Range {
    const char* at = nullptr;
    int64_t bytes = 0;
  };

  void clear() {
    ranges_.clear();
    next_ = 0;
  }
  void add(const void* at, int64_t bytes) {
    ranges_.push_back({static_cast<const char*>(at), bytes});
  }
  bool empty() const { return next_ == ranges_.size(); }

  // At most `most` bytes of the first range; nothing once all have been taken.
  Range take(int64_t most) {
    if (empty()) return {};
    Range& first = ranges_[next_];
    const Range piece{first.at, std::min(first.bytes, most)};
    first.at += piece.bytes;
    first.bytes -= piece.bytes;
    if (first.bytes == 0) ++next_;
    return piece;
  }

 private:
  std::vector<Range> ranges_;
  size_t next_ = 0;
};

}  // namespace banyan::kernels
