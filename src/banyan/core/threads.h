// How many threads one process computes with. Torch-free.
//
// One per core that the process may run on, shared among the processes of a launcher on this
// machine, so that ranks do not compete for cores. Two hardware threads of a core count once: they
// share its matrix units.
#pragma once

#include <cstdint>
#include <optional>

namespace banyan {

// What the choice depends on.
struct ThreadFacts {
  int64_t cores = 1;         // of the processor affinity, within the container's quota
  int64_t local_ranks = 1;   // processes of the launcher on this machine
  bool bound_alone = false;  // the launcher gave this process cores of its own
  bool by_torchrun = false;  // OMP_NUM_THREADS may be torchrun's 1, not the user's wish
  std::optional<int64_t> omp_threads = std::nullopt;  // OMP_NUM_THREADS
};

// OMP_NUM_THREADS where the user set it, else cores / local_ranks, at least 1. torchrun sets
// OMP_NUM_THREADS=1 for several ranks of a machine where the user has not: that is no wish.
int64_t choose_threads(const ThreadFacts& facts);

// Of this process: sched_getaffinity, the cgroup's cpu.max, and LOCAL_WORLD_SIZE (torchrun),
// OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS or SLURM_STEP_TASKS_PER_NODE, whichever is set first.
ThreadFacts thread_facts();

}  // namespace banyan
