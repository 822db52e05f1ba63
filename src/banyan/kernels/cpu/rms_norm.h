// RMSNorm on bf16 rows, fp32 statistics, rule N1: y = w * bf16(x r), r = 1 / sqrt(mean(x²) + eps).
// Backward, with xh = x r and g = w dy: dx = r (g - xh mean(g xh)) (+ residual), dw = sum over rows
// of dy * bf16(xh). Sums over a row use sixteen lanes and one tree; dw is summed in blocks of 64
// rows, then over the blocks, both ascending.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/scratch.h"

namespace banyan::kernels {

// x, y [rows, n], weight [n], all bf16. Parallel over rows.
void rms_norm(
    int64_t rows, int64_t n, float eps, const uint16_t* x, const uint16_t* weight, uint16_t* y);

// The same on one thread.
void rms_norm_rows(
    int64_t rows, int64_t n, float eps, const uint16_t* x, const uint16_t* weight, uint16_t* y);

// dy, x, residual (or null), dx [rows, n] bf16; grad_weight [n] fp32 is added to. Parallel over
// blocks of rows.
void rms_norm_backward(int64_t rows,
                       int64_t n,
                       float eps,
                       const uint16_t* dy,
                       const uint16_t* x,
                       const uint16_t* weight,
                       const uint16_t* residual,
                       uint16_t* dx,
                       float* grad_weight);

}  // namespace banyan::kernels
