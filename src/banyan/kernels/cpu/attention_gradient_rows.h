// The steps of attention_gradient_tile.h on processors with avx512_bf16, bit for bit: products in
// register tiles of up to 6 rows x 64 columns, each over the keys or queries alone that the causal
// mask leaves. What is skipped is a sum of zeros, or NaN where an operand is none that is finite.
#pragma once

#include "banyan/kernels/cpu/attention_gradient_tile.h"

namespace banyan::kernels {

// True where register tiles are the kernel of gemm.h and head_dim is a multiple of 16.
bool gradient_rows_available(int64_t head_dim);

void key_gradients_in_registers(const GradientTile& tile,
                                const GradientScratch& scratch,
                                float* dk,
                                float* dv);
void query_gradients_in_registers(const GradientTile& tile,
                                  const GradientScratch& scratch,
                                  bool add,
                                  float* dq);

}  // namespace banyan::kernels
