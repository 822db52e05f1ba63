// Sums and maxima of a row in one fixed order: sixteen lanes, element i in lane i % 16, then one
// tree. So the bits do not depend on how wide the processor's vectors are.
#pragma once

#include <cstdint>
#include <cstring>

#include "banyan/kernels/cpu/multiversion.h"

namespace banyan::kernels {

inline constexpr int64_t kLanes = 16;

struct Lanes {
  alignas(64) float at[kLanes] = {};

  // Lane i + 8 to lane i, then 4, 2, 1 apart. The halves are vectors of the compiler (GCC and
  // clang), which does not find them in a loop over an array.
  BANYAN_INLINE float sum() const {
    using Eight = float __attribute__((vector_size(32)));
    using Four = float __attribute__((vector_size(16)));
    Eight eight[2];
    std::memcpy(eight, at, sizeof(eight));
    eight[0] += eight[1];
    Four four[2];
    std::memcpy(four, eight, sizeof(four));
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
  }

  BANYAN_INLINE float max() const {
    using Eight = float __attribute__((vector_size(32)));
    using Four = float __attribute__((vector_size(16)));
    Eight eight[2];
    std::memcpy(eight, at, sizeof(eight));
    eight[0] = eight[0] > eight[1] ? eight[0] : eight[1];
    Four four[2];
    std::memcpy(four, eight, sizeof(four));
    four[0] = four[0] > four[1] ? four[0] : four[1];
    const float left = four[0][0] > four[0][2] ? four[0][0] : four[0][2];
    const float right = four[0][1] > four[0][3] ? four[0][1] : four[0][3];
    return left > right ? left : right;
  }
};

}  // namespace banyan::kernels
