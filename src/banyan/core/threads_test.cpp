#include "banyan/core/threads.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace banyan {
namespace {

// Sets a variable for its life; null removes it.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    if (before != nullptr) before_ = before;
    set(value);
  }
  ~Environment() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) const {
    value != nullptr ? setenv(name_, value, /*overwrite=*/1) : unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> before_;
};

TEST(Threads, OneProcessTakesItsCores) { EXPECT_EQ(choose_threads({.cores = 6}), 6); }

TEST(Threads, RanksShareTheCores) {
  EXPECT_EQ(choose_threads({.cores = 16, .local_ranks = 4}), 4);
  EXPECT_EQ(choose_threads({.cores = 7, .local_ranks = 2}), 3);
  EXPECT_EQ(choose_threads({.cores = 2, .local_ranks = 8}), 1);
}

TEST(Threads, RanksThatTheLauncherBoundKeepTheirCores) {
  EXPECT_EQ(choose_threads({.cores = 4, .local_ranks = 4, .bound_alone = true}), 4);
}

TEST(Threads, TorchrunsOneIsNoWish) {
  const ThreadFacts torchrun{.cores = 8, .local_ranks = 2, .by_torchrun = true, .omp_threads = 1};
  EXPECT_EQ(choose_threads(torchrun), 4);
}

TEST(Threads, TheUsersWishWins) {
  EXPECT_EQ(choose_threads({.cores = 8, .omp_threads = 3}), 3);
  EXPECT_EQ(choose_threads({.cores = 8, .local_ranks = 2, .omp_threads = 1}), 1);
  EXPECT_EQ(choose_threads({.cores = 8, .local_ranks = 2, .by_torchrun = true, .omp_threads = 3}),
            3);
  // torchrun with one process sets nothing, so a 1 is the user's.
  EXPECT_EQ(choose_threads({.cores = 8, .by_torchrun = true, .omp_threads = 1}), 1);
}

TEST(Threads, FactsComeFromTheEnvironment) {
  const Environment torchrun("TORCHELASTIC_RUN_ID", "none");
  const Environment ranks("LOCAL_WORLD_SIZE", "4");
  const Environment omp("OMP_NUM_THREADS", "1");
  const ThreadFacts facts = thread_facts();
  EXPECT_EQ(facts.local_ranks, 4);
  EXPECT_TRUE(facts.by_torchrun);
  EXPECT_EQ(facts.omp_threads, 1);
  EXPECT_GE(facts.cores, 1);
}

TEST(Threads, WordsThatAreNoNumbersAreNoFacts) {
  const Environment ranks("LOCAL_WORLD_SIZE", "many");
  const Environment ompi("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  const Environment omp("OMP_NUM_THREADS", nullptr);
  const ThreadFacts facts = thread_facts();
  EXPECT_EQ(facts.local_ranks, 2);
  EXPECT_FALSE(facts.omp_threads.has_value());
}

}  // namespace
}  // namespace banyan
