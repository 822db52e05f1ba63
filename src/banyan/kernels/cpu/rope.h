// Rotary embedding on bf16, half-split: y1 = x1 c - x2 s, y2 = x2 c + x1 s in fp32 with one
// rounding.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// x, y [tokens, heads, head_dim] bf16, tokens x_stride and y_stride apart; cos, sin [P, head_dim /
// 2] fp32; positions [tokens] inside the table. `transpose` rotates the other way (the backward).
// y may be x. Parallel over tokens.
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
          int64_t y_stride);

// The heads of one token, x, y [heads, 2 half], with the row of the tables at its position. `sign`
// is -1 for the transpose.
void rope_token(int64_t heads,
                int64_t half,
                float sign,
                const float* cos,
                const float* sin,
                const uint16_t* x,
                uint16_t* y);

}  // namespace banyan::kernels
