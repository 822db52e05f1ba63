// What this machine can do with a model's weights, all threads working: how fast it multiplies a
// few rows, and how fast it reads every packed weight once. `banyan bench rollout` holds the
// engine's speed against these two (rollout_limit.h).
#pragma once

#include <cstdint>

#include "banyan/bench/rollout_limit.h"
#include "banyan/core/device.h"
#include "banyan/models/causal_lm.h"

namespace banyan::bench {

struct MachineRates {
  // FLOP/s of bf16 products of `rows` rows with the model's matrices, one matrix at a time while it
  // stays in the cache: by the packed kernel, by at::mm, and the larger of the two.
  double packed_flops_per_s = 0.0;
  double mm_flops_per_s = 0.0;
  double flops_per_s = 0.0;
  double bytes_per_s = 0.0;  // reading all packed weights from end to end
  int64_t weight_bytes = 0;  // of all packed weights
  int64_t rows = 0;
};

// Medians over `repeats` runs of each. Allocates weights of the model's shapes with random values,
// packed as `options` packs them; the model itself is not touched. CPU and bf16 only: throws
// [bench] otherwise.
MachineRates measure_rates(const models::ModelShape& shape,
                           const ComputeOptions& options,
                           int64_t rows = 64,
                           int64_t repeats = 5);

// Bytes that all threads move per second, far beyond the caches: reading them, and copying them
// (read and written bytes count). The best of `repeats` runs each: a limit, not an average.
struct MemoryRates {
  double read_bytes_per_s = 0.0;
  double copy_bytes_per_s = 0.0;
};

MemoryRates measure_memory(int64_t num_bytes = int64_t{256} << 20, int64_t repeats = 5);

// FLOP/s of at::mm on bf16 matrices [2048, 1536] x [1536, 1536] with all threads, the best of
// `tries`: what model FLOPs are held to.
double measure_matrix_rate(int64_t tries = 20);

// What a decode step of the model reads and computes, in bf16: the constants of rollout_limit.h.
ModelCost model_cost(const models::ModelShape& shape);

}  // namespace banyan::bench
