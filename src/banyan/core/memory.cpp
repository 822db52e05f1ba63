#include "banyan/core/memory.h"

#include <malloc.h>

#include <fstream>
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
