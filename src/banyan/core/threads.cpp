#include "banyan/core/threads.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace banyan {
namespace {

// A positive number in an environment variable.
std::optional<int64_t> positive(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  const std::string value(text);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || number < 1) return std::nullopt;
  return number;
}

int64_t local_ranks() {
  for (const char* name : {"LOCAL_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           "MPI_LOCALNRANKS",
                           "SLURM_STEP_TASKS_PER_NODE"}) {
    if (const std::optional<int64_t> ranks = positive(name)) return *ranks;
  }
  return 1;
}

#if defined(__linux__)

// Cores behind the logical processors of `set`: siblings have one list of siblings.
int64_t count_cores(const cpu_set_t& set) {
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &set)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    cores.insert(std::getline(file, siblings) ? siblings : "cpu " + std::to_string(cpu));
  }
  return static_cast<int64_t>(cores.size());
}

// Processors' worth of time that the container gives: "max 100000", or "150000 100000" for 1.5.
int64_t quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double time = 0.0;
  double period = 0.0;
  if (!(file >> time >> period) || period <= 0.0) return INT64_MAX;
  return std::max<int64_t>(1, static_cast<int64_t>(time / period + 0.5));
}

#endif

}  // namespace

int64_t choose_threads(const ThreadFacts& facts) {
  const bool is_torchruns = facts.by_torchrun && facts.local_ranks > 1 && facts.omp_threads == 1;
  if (facts.omp_threads && !is_torchruns) return *facts.omp_threads;
  const int64_t ranks = facts.bound_alone ? 1 : std::max<int64_t>(1, facts.local_ranks);
  return std::max<int64_t>(1, facts.cores / ranks);
}

ThreadFacts thread_facts() {
  ThreadFacts facts;
  facts.cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  facts.local_ranks = local_ranks();
  facts.by_torchrun = std::getenv("TORCHELASTIC_RUN_ID") != nullptr;
  facts.omp_threads = positive("OMP_NUM_THREADS");
#if defined(__linux__)
  cpu_set_t own, launcher;
  if (sched_getaffinity(0, sizeof(own), &own) == 0) {
    facts.cores = std::min(count_cores(own), quota());
    // A container gives all of its processes one set; a launcher that binds gives each its own.
    facts.bound_alone = facts.local_ranks > 1 &&
                        sched_getaffinity(getppid(), sizeof(launcher), &launcher) == 0 &&
                        !CPU_EQUAL(&own, &launcher);
  }
#endif
  return facts;
}

}  // namespace banyan
