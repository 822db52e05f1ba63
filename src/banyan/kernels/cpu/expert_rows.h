// Rows on their way to experts and back, bf16. A token's row goes to several experts; what comes
// back is weighted and added in the order of the token's choices, in fp32 with one rounding, so the
// bits of a token depend on it alone.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// y [tokens, n] = sum over c of weight [tokens, choices] times the row slot [tokens, choices] of
// rows [S, n]; then the residual [tokens, n] is added and the sum rounded once more. Weight (all
// ones) and residual may be null. Parallel over tokens.
void combine_rows(int64_t tokens,
                  int64_t choices,
                  int64_t n,
                  const uint16_t* rows,
                  const int64_t* slot,
                  const float* weight,
                  const uint16_t* residual,
                  uint16_t* y);

// scaled [rows, n] = weight [rows] x [rows, n]; dot [rows] = x [rows, n] · other [rows, n]. Either
// output may be null. Parallel over rows.
void scale_and_dot_rows(int64_t rows,
                        int64_t n,
                        const float* weight,
                        const uint16_t* x,
                        const uint16_t* other,
                        uint16_t* scaled,
                        float* dot);

}  // namespace banyan::kernels
