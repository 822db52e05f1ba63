// SwiGLU on bf16; formulas in the header.
#include "banyan/kernels/cpu/swiglu.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

BANYAN_MULTIVERSION
void swiglu_rows(int64_t rows,
                 int64_t n,
                 const uint16_t* __restrict gate_up,
                 uint16_t* __restrict y) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* gates = gate_up + row * 2 * n;
    const uint16_t* ups = gates + n;
    uint16_t* out = y + row * n;
    for (int64_t i = 0; i < n; ++i) {
      const float gate = bf16_to_f32(gates[i]);
      out[i] = f32_to_bf16(gate * sigmoid_f32(gate) * bf16_to_f32(ups[i]));
    }
  }
}

// Each output stands where an input of the same element may stand, so no element waits for another.
BANYAN_MULTIVERSION
void swiglu_backward_rows(int64_t rows,
                          int64_t n,
                          const uint16_t* dy,
                          const uint16_t* gate_up,
                          uint16_t* grad,
                          uint16_t* y) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* gates = gate_up + row * 2 * n;
    const uint16_t* ups = gates + n;
    const uint16_t* in = dy + row * n;
    uint16_t* out = grad + row * 2 * n;
    uint16_t* again = y + row * n;
    BANYAN_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const float gate = bf16_to_f32(gates[i]);
      const float up = bf16_to_f32(ups[i]);
      const float d = bf16_to_f32(in[i]);
      const float s = sigmoid_f32(gate);
      out[i] = f32_to_bf16(d * up * s * fma(gate, 1.0f - s, 1.0f));
      out[n + i] = f32_to_bf16(d * gate * s);
      again[i] = f32_to_bf16(gate * s * up);
    }
  }
}

void swiglu(int64_t tokens, int64_t n, const uint16_t* gate_up, uint16_t* y) {
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(n, 1));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    swiglu_rows(end - begin, n, gate_up + begin * 2 * n, y + begin * n);
  });
}

void swiglu_backward(int64_t tokens,
                     int64_t n,
                     const uint16_t* dy,
                     const uint16_t* gate_up,
                     uint16_t* grad,
                     uint16_t* y) {
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(n, 1));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    swiglu_backward_rows(end - begin,
                         n,
                         dy + begin * n,
                         gate_up + begin * 2 * n,
                         grad + begin * 2 * n,
                         y + begin * n);
  });
}

}  // namespace banyan::kernels
