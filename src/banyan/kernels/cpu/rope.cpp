// Rotary embedding on bf16; the formula is in the header.
#include "banyan/kernels/cpu/rope.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

// The heads of one token. `sign` is -1 for the transpose.
BANYAN_MULTIVERSION
void rope_token(int64_t heads,
                int64_t half,
                float sign,
                const float* __restrict cos,
                const float* __restrict sin,
                const uint16_t* __restrict x,
                uint16_t* __restrict y) {
  for (int64_t head = 0; head < heads; ++head) {
    const uint16_t* in = x + head * 2 * half;
    uint16_t* out = y + head * 2 * half;
    for (int64_t i = 0; i < half; ++i) {
      const float x1 = bf16_to_f32(in[i]);
      const float x2 = bf16_to_f32(in[half + i]);
      const float s = sign * sin[i];
      out[i] = f32_to_bf16(fma(x1, cos[i], -(x2 * s)));
      out[half + i] = f32_to_bf16(fma(x2, cos[i], x1 * s));
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
