// Resident memory of this process, from the kernel's accounting. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>

namespace banyan {

// Bytes resident now; 0 where /proc is missing.
int64_t resident_bytes();

// Bytes of [data, data + num_bytes) that are in memory now, page by page; the range need not be
// mapped any more. 0 where /proc is missing.
int64_t resident_bytes_of(const void* data, size_t num_bytes);

// Gives the whole pages of [data, data + num_bytes) back to the kernel, ahead of the allocator,
// which may keep what is freed. Nobody may want their values any more: they are zeros, or those of
// the file behind them. The pages at the ends stay, and so do pages that are locked.
void discard(void* data, size_t num_bytes);

// Highest resident bytes since the process started or since the last reset.
int64_t peak_resident_bytes();

// Starts a new peak measurement; false where the kernel does not allow it.
bool reset_peak_resident();

// Lets the allocator keep what a pass frees for the next one, whatever its size. By default blocks
// above 32 MiB (one activation of 8,000 tokens) come from the kernel and go back to it every time,
// page by page: a tenth of a pass. For processes that train; once is enough, again does no harm.
void keep_freed_memory();

// Gives back to the kernel what is free now, so that resident bytes count what is in use.
void release_freed_memory();

}  // namespace banyan
