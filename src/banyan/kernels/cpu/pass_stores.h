// What the products of a decoder pass (decoder_pass.h) do with a tile [rows, columns] of fp32.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// x = bf16(bf16(c + bias) + x); the bias may be null.
void add_rounded(const float* c,
                 int64_t ldc,
                 int64_t rows,
                 int64_t columns,
                 const uint16_t* bias,
                 uint16_t* x,
                 int64_t ldx);

// act = silu(g) u of tiles of gate and up, both rounded to bf16 first; both biases or none.
void swiglu_tiles(const float* gate,
                  const float* up,
                  int64_t ld,
                  int64_t rows,
                  int64_t columns,
                  const uint16_t* gate_bias,
                  const uint16_t* up_bias,
                  uint16_t* act,
                  int64_t ld_act);

}  // namespace banyan::kernels
