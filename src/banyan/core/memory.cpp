#include "banyan/core/memory.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

namespace banyan {
namespace {

// "VmRSS:   123 kB" in /proc/self/status.
int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kilobytes = 0;
    if (word == field && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

int64_t resident_bytes() { return status_bytes("VmRSS:"); }

// /proc/self/pagemap: one word per page, bit 63 "present", all zero where nothing is mapped.
int64_t resident_bytes_of(const void* data, size_t num_bytes) {
  if (num_bytes == 0) return 0;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = reinterpret_cast<uintptr_t>(data) / page;
  const uint64_t last = (reinterpret_cast<uintptr_t>(data) + num_bytes - 1) / page + 1;
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return 0;
  uint64_t words[4096];
  int64_t num_present = 0;
  for (uint64_t at = first; at < last;) {
    const size_t wanted = std::min<uint64_t>(last - at, std::size(words));
    const ssize_t got = pread(map, words, wanted * 8, static_cast<off_t>(at * 8));
    if (got < 8) break;
    for (ssize_t i = 0; i < got / 8; ++i) num_present += static_cast<int64_t>(words[i] >> 63);
    at += static_cast<uint64_t>(got / 8);
  }
  close(map);
  return num_present * static_cast<int64_t>(page);
}

void discard(void* data, size_t num_bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + num_bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

int64_t peak_resident_bytes() { return status_bytes("VmHWM:"); }

bool reset_peak_resident() {
  std::ofstream clear("/proc/self/clear_refs");
  clear << "5" << std::flush;
  return clear.good();
}

void keep_freed_memory() {
  constexpr int kNever = std::numeric_limits<int>::max();
  mallopt(M_MMAP_THRESHOLD, kNever);
  mallopt(M_TRIM_THRESHOLD, kNever);
}

void release_freed_memory() { malloc_trim(0); }

}  // namespace banyan
