// Rotary embedding on bf16; the formula is in the header.
#include "banyan/kernels/cpu/rope.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "banyan/kernels/cpu/lanes.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

namespace {

// Both halves of one head, read before they are written: y may be x.
BANYAN_INLINE void rotate(int64_t n,
                          float sign,
                          const float* __restrict cos,
                          const float* __restrict sin,
                          const uint16_t* x1,
                          const uint16_t* x2,
                          uint16_t* y1,
                          uint16_t* y2) {
  uint16_t a[kLanes];
  uint16_t b[kLanes];
  for (int64_t i = 0; i < n; ++i) {
    const float first = bf16_to_f32(x1[i]);
    const float second = bf16_to_f32(x2[i]);
    const float s = sign * sin[i];
    a[i] = f32_to_bf16(fma(first, cos[i], -(second * s)));
    b[i] = f32_to_bf16(fma(second, cos[i], first * s));
  }
  for (int64_t i = 0; i < n; ++i) y1[i] = a[i];
  for (int64_t i = 0; i < n; ++i) y2[i] = b[i];
}

}  // namespace

BANYAN_MULTIVERSION
void rope_token(int64_t heads,
                int64_t half,
                float sign,
                const float* __restrict cos,
                const float* __restrict sin,
                const uint16_t* x,
                uint16_t* y) {
  for (int64_t head = 0; head < heads; ++head) {
    const uint16_t* in = x + head * 2 * half;
    uint16_t* out = y + head * 2 * half;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      rotate(kLanes, sign, cos + i, sin + i, in + i, in + half + i, out + i, out + half + i);
    }
    if (i < half) {
      rotate(half - i, sign, cos + i, sin + i, in + i, in + half + i, out + i, out + half + i);
    }
  }
}

void rope(int64_t tokens,
          int64_t heads,
          int64_t head_dim,
          bool transpose,
          const int32_t* positions,
          const float* cos,
          const float* sin,
          const uint16_t* x,
          int64_t x_stride,
          uint16_t* y,
          int64_t y_stride) {
  const int64_t half = head_dim / 2;
  const int64_t row = heads * head_dim;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(row, 1));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = positions[t] * half;
      rope_token(heads,
                 half,
                 transpose ? -1.0f : 1.0f,
                 cos + at,
                 sin + at,
                 x + t * x_stride,
                 y + t * y_stride);
    }
  });
}

}  // namespace banyan::kernels
