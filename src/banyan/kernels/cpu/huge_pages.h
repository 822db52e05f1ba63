// Asks the kernel for huge pages (2 MiB) behind a large buffer that is read from end to end again
// and again, such as packed weights: fewer page faults and fewer misses of the address translation
// cache.
#pragma once

#include <cstddef>

namespace banyan::kernels {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Call before the memory is first touched. A wish only: does nothing where the system has no such
// call, and for buffers of less than two huge pages.
void advise_huge_pages(void* data, size_t bytes);

}  // namespace banyan::kernels
