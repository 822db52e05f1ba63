// Joining and the barrier of a team.
#include "banyan/kernels/cpu/team.h"

#include <string>

namespace banyan::kernels {
namespace {

constexpr int kSpins = 2000;  // some tens of microseconds: longer than a balanced phase needs

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Team::wait_while(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

// The store is sequentially consistent and not merely a release: notify_all first looks whether
// anybody sleeps, and a store that it could overtake would leave who goes to sleep meanwhile there
// for good.
void Team::announce(std::atomic<uint32_t>& word, uint32_t value) {
  word.store(value, std::memory_order_seq_cst);
  word.notify_all();
}

bool Team::runs_at_once() {
  static const bool openmp =
      at::get_parallel_info().find("parallel backend: OpenMP") != std::string::npos;
  return openmp;
}

int64_t Team::join(int64_t count, int64_t wanted) {
  const int64_t rank = joined_.fetch_add(1);
  if (handed_out_.fetch_add(count) + count == wanted) {
    size_ = joined_.load();
    announce(complete_, 1);
  } else {
    wait_while(complete_, 0);
  }
  return rank;
}

void Team::fail() {
  failed_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
}

void Team::Member::barrier() {
  if (team_.size_ == 1) return;
  const uint32_t round = team_.round_.load();
  if (!team_.failed_.load()) {
    if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
      team_.arrived_.store(0, std::memory_order_relaxed);
      announce(team_.round_, round + 1);
    } else {
      wait_while(team_.round_, round);
    }
  }
  if (team_.failed_.load(std::memory_order_acquire)) {
    throw Stopped();
  }
}

}  // namespace banyan::kernels
