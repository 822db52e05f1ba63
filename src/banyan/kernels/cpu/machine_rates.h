// What the machine can do at most, measured: the two rates of the rollout specification's limit
// (section 7), with the threads that the engine uses.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace banyan::kernels {

struct MachineRates {
  double read_bytes_per_second = 0.0;
  double flops_per_second = 0.0;
};

// Bandwidth: the best of a few sweeps of all threads over `data`, each over a share of its own;
// give it weights that exceed the caches. Arithmetic: bf16 products of `rows` rows with panels of
// `depth` that stay in the cache, the best of a few rounds. About a quarter of a second.
MachineRates measure_rates(const c10::BFloat16* data, int64_t count, int64_t rows, int64_t depth);

}  // namespace banyan::kernels
