#include "banyan/kernels/cpu/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace banyan::kernels {

void advise_huge_pages(void* data, size_t bytes) {
  if (bytes < 2 * kHugePage) return;
#if defined(__linux__)
  // Only whole huge pages inside the buffer: its ends may share a page with other data.
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (start + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data;
#endif
}

}  // namespace banyan::kernels
