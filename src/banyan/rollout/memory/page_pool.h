// Which pages of the KV pool are in use, and by how many holders. Bookkeeping only: the tensors are
// ops::KvPool. A page with several holders is read-only; who wants to write it takes a copy
// (copy-on-write). Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace banyan::rollout {

// Path positions of one page; equals ops::kPathTile.
inline constexpr int32_t kPageTokens = 64;

// Pages that hold `tokens` positions.
inline constexpr int32_t pages_for(int64_t tokens) {
  return static_cast<int32_t>((tokens + kPageTokens - 1) / kPageTokens);
}

// An entry of a pass: the contents of a page move. Entries are carried out strictly in order,
// before the forward; a source may be the target of a later entry.
struct PageCopy {
  enum class Kind : uint8_t {
    kCopy,     // page to page
    kSpill,    // page to slot of host memory
    kRestore,  // slot of host memory to page
  };
  int32_t from = 0;
  int32_t to = 0;
  Kind kind = Kind::kCopy;
};

class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  int32_t num_pages() const { return static_cast<int32_t>(holders_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t holders(int32_t page) const { return holders_[page]; }

  // A free page, now with one holder. The caller makes sure that there is one.
  int32_t take();
  // One more holder of a page in use.
  void share(int32_t page);
  // One holder less; the last one frees the page.
  void release(int32_t page);

 private:
  std::vector<int32_t> holders_;  // per page, 0 = free
  std::vector<int32_t> free_;  // a stack: the page freed last is taken first, while it is in cache
};

}  // namespace banyan::rollout
