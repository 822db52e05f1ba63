// A team of threads that walks through many short phases together: one fork and join of the thread
// pool for a whole pass of the rollout, and a barrier of a fraction of a microsecond between phases
// in place of a fork and join for each.
//
// The threads are those of at::parallel_for, so nothing competes with them for the cores; between
// passes they sleep or spin as the pool lets them. At a barrier a member spins for a moment, then
// sleeps until the last one comes.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>

namespace banyan::kernels {

class Team {
 public:
  // One member's view.
  class Member {
   public:
    int64_t rank() const { return rank_; }
    int64_t size() const { return team_.size_; }
    // Every member calls it equally often; what was written before it is seen after it. Leaves
    // the work of all others when one has thrown.
    void barrier();

    // The member's share of [0, count): contiguous, equal to one item.
    int64_t first_of(int64_t count) const { return count * rank_ / team_.size_; }
    int64_t last_of(int64_t count) const { return count * (rank_ + 1) / team_.size_; }

   private:
    friend class Team;
    Member(Team& team, int64_t rank) : team_(team), rank_(rank) {}
    Team& team_;
    int64_t rank_;
  };

  // Calls work(member) on up to at::get_num_threads() threads at once and returns when all have
  // returned. Inside another parallel region, or where the pool lends fewer threads, the team is
  // smaller; where the pool is not OpenMP's and may hand chunks out one after another, it is one.
  // An exception of one member ends the others at their next barrier and is rethrown.
  template <typename Work>
  static void run(const Work& work) {
    const int64_t wanted = runs_at_once() ? at::get_num_threads() : 1;
    Team team;
    at::parallel_for(0, wanted, 1, [&](int64_t begin, int64_t end) {
      Member member(team, team.join(end - begin, wanted));
      try {
        work(member);
      } catch (const Stopped&) {
        return;  // another member throws the reason
      } catch (...) {
        team.fail();
        throw;
      }
    });
  }

 private:
  struct Stopped {};

  // Whether at::parallel_for runs all chunks of a call at the same time.
  static bool runs_at_once();

  // Waits until all of [0, wanted) has been handed out; the member's rank.
  int64_t join(int64_t count, int64_t wanted);
  void fail();
  // Spins, then sleeps while `word` is `old`.
  static void wait_while(const std::atomic<uint32_t>& word, uint32_t old);
  // word <- value, and all who wait for it go on.
  static void announce(std::atomic<uint32_t>& word, uint32_t value);

  alignas(64) std::atomic<int64_t> handed_out_{0};
  std::atomic<int64_t> joined_{0};
  std::atomic<uint32_t> complete_{0};
  int64_t size_ = 1;  // final once complete_
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<bool> failed_{false};
};

// Hands out the items of one phase in order: the first to each member is that of its rank, which it
// can know, and prepare for, beforehand.
class Tickets {
 public:
  void reset() { taken_.store(0, std::memory_order_relaxed); }
  int64_t next(const Team::Member& member) {
    return member.size() + taken_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  alignas(64) std::atomic<int64_t> taken_{0};
};

}  // namespace banyan::kernels
