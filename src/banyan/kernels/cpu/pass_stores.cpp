// Tiles to bf16, element by element; formulas in the header.
#include "banyan/kernels/cpu/pass_stores.h"

#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

template <bool kBias>
BANYAN_INLINE void swiglu_of_tiles(const float* __restrict gate,
                                   const float* __restrict up,
                                   int64_t ld,
                                   int64_t rows,
                                   int64_t columns,
                                   const uint16_t* __restrict gate_bias,
                                   const uint16_t* __restrict up_bias,
                                   uint16_t* __restrict act,
                                   int64_t ld_act) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* gates = gate + r * ld;
    const float* ups = up + r * ld;
    uint16_t* out = act + r * ld_act;
    for (int64_t j = 0; j < columns; ++j) {
      const float raw_gate = kBias ? gates[j] + bf16_to_f32(gate_bias[j]) : gates[j];
      const float raw_up = kBias ? ups[j] + bf16_to_f32(up_bias[j]) : ups[j];
      const float g = bf16_to_f32(f32_to_bf16(raw_gate));
      out[j] = f32_to_bf16(g * sigmoid_f32(g) * bf16_to_f32(f32_to_bf16(raw_up)));
    }
  }
}

}  // namespace

BANYAN_MULTIVERSION
void add_rounded(const float* __restrict c,
                 int64_t ldc,
                 int64_t rows,
                 int64_t columns,
                 const uint16_t* __restrict bias,
                 uint16_t* __restrict x,
                 int64_t ldx) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = c + r * ldc;
    uint16_t* to = x + r * ldx;
    if (bias != nullptr) {
      for (int64_t j = 0; j < columns; ++j) {
        const float y = bf16_to_f32(f32_to_bf16(from[j] + bf16_to_f32(bias[j])));
        to[j] = f32_to_bf16(y + bf16_to_f32(to[j]));
      }
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        to[j] = f32_to_bf16(bf16_to_f32(f32_to_bf16(from[j])) + bf16_to_f32(to[j]));
      }
    }
  }
}

BANYAN_MULTIVERSION
void swiglu_tiles(const float* gate,
                  const float* up,
                  int64_t ld,
                  int64_t rows,
                  int64_t columns,
                  const uint16_t* gate_bias,
                  const uint16_t* up_bias,
                  uint16_t* act,
                  int64_t ld_act) {
  if (gate_bias == nullptr) {
    swiglu_of_tiles<false>(gate, up, ld, rows, columns, nullptr, nullptr, act, ld_act);
  } else {
    swiglu_of_tiles<true>(gate, up, ld, rows, columns, gate_bias, up_bias, act, ld_act);
  }
}

}  // namespace banyan::kernels
