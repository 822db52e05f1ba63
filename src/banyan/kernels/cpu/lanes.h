// Sums and maxima of a row in one fixed order: sixteen lanes, element i in lane i % 16, then one
// tree. So the bits do not depend on how wide the processor's vectors are.
#pragma once

#include <cstdint>
#include <limits>

#include "banyan/kernels/cpu/multiversion.h"

namespace banyan::kernels {

inline constexpr int64_t kLanes = 16;

struct Lanes {
  float at[kLanes] = {};

  BANYAN_INLINE float sum() {
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) at[i] += at[i + width];
    }
    return at[0];
  }

  BANYAN_INLINE float max() {
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) at[i] = at[i] > at[i + width] ? at[i] : at[i + width];
    }
    return at[0];
  }
};

}  // namespace banyan::kernels
