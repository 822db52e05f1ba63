// SwiGLU on bf16: y = silu(gate) up; with s = sigmoid(gate), d(up) = dy gate s and
// d(gate) = dy up s (1 + gate (1 - s)). fp32 arithmetic, one rounding per output.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// gate_up [tokens, 2 n] (gate first) -> y [tokens, n], bf16. Parallel over tokens.
void swiglu(int64_t tokens, int64_t n, const uint16_t* gate_up, uint16_t* y);

// The same on one thread.
void swiglu_rows(int64_t tokens, int64_t n, const uint16_t* gate_up, uint16_t* y);

// dy [tokens, n], gate_up [tokens, 2 n] -> grad [tokens, 2 n] and, with the bits of swiglu, y
// [tokens, n] again; bf16. grad may be gate_up itself, and y dy.
void swiglu_backward(int64_t tokens,
                     int64_t n,
                     const uint16_t* dy,
                     const uint16_t* gate_up,
                     uint16_t* grad,
                     uint16_t* y);

}  // namespace banyan::kernels
