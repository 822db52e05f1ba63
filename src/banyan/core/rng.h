// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). A draw is a pure function of (key, counter), so batch-mates, order, threads
// and restarts cannot change it. Torch-free.
#pragma once

#include <array>
#include <cstdint>

namespace banyan {

// One Philox block: four 32-bit words from a 64-bit key and a 128-bit counter.
std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_low, uint64_t counter_high);

// Identity of one response's noise: every draw is keyed by (seed, step, row, sample index).
struct NoiseKey {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint64_t row = 0;
  uint64_t index = 0;
};

// Uniform in [0, 1) with 24 random bits, for the token at absolute `position` of the response's
// sequence.
float uniform(const NoiseKey& key, uint64_t position);

}  // namespace banyan
