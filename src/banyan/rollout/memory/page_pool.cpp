#include "banyan/rollout/memory/page_pool.h"

#include "banyan/core/error.h"

namespace banyan::rollout {

PagePool::PagePool(int32_t num_pages) : holders_(num_pages, 0) {
  free_.reserve(num_pages);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() {
  BANYAN_ASSERT(!free_.empty(), "page pool: took a page of a full pool");
  const int32_t page = free_.back();
  free_.pop_back();
  holders_[page] = 1;
  return page;
}

void PagePool::share(int32_t page) {
  BANYAN_ASSERT(holders_.at(page) > 0, "page pool: shared free page ", page);
  ++holders_[page];
}

void PagePool::release(int32_t page) {
  BANYAN_ASSERT(holders_.at(page) > 0, "page pool: released free page ", page);
  if (--holders_[page] == 0) free_.push_back(page);
}

}  // namespace banyan::rollout
