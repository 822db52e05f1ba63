// Blocks of the products of training, in the register tiles of bf16_product.h and with its bits,
// but with what follows the product done while the sums stand in registers: rounding to bf16 (with
// a bias, with a residual), or adding to fp32 gradients. The lines that a tile will write are
// fetched while it multiplies.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace banyan::kernels {

// A [rows, depth] times one panel of B, or its first half. Only where bf16_product_available().
struct MatmulBlock {
  const c10::BFloat16* a = nullptr;  // row stride lda
  int64_t lda = 0;
  int64_t rows = 0;
  const c10::BFloat16* b = nullptr;  // [depth / 2][64][2]
  int64_t depth = 0;                 // even
  int64_t columns = 0;               // 32 or 64
};

// c += A B, row stride ldc, for rows of A in groups (below): block.a is the first group, block.lda
// the values from one to the next. One thread.
void matmul_add(const MatmulBlock& block, float* c, int64_t ldc);

// Rows of an A that stands transposed, as x = Aᵀ, in groups in the order in which a register tile
// reads them: [group][depth / 2][6][2].
inline constexpr int64_t kGroupRows = 6;
// Values from one group to the next, so that groups do not all begin in the same lines of a cache.
constexpr int64_t group_stride(int64_t depth) { return kGroupRows * depth + 32; }
// x [depth, rows] (row stride ld) into groups whose whole depth is `whole`: depth [first, first +
// padded_depth) of each, first and padded_depth even, with zeros from `depth` on.
void pack_row_groups(const c10::BFloat16* x,
                     int64_t ld,
                     int64_t depth,
                     int64_t rows,
                     int64_t padded_depth,
                     c10::BFloat16* groups,
                     int64_t whole,
                     int64_t first);

// What a product becomes: out = bf16(A B + bias), or bf16(that + residual), both rounded to nearest
// even. `out` may be `residual`.
struct RoundedOutput {
  const c10::BFloat16* bias = nullptr;      // [columns] or null
  const c10::BFloat16* residual = nullptr;  // [rows, columns], row stride ld, or null
  c10::BFloat16* out = nullptr;             // [rows, columns], row stride ld
  int64_t ld = 0;
};
void matmul_round(const MatmulBlock& block, const RoundedOutput& output);

}  // namespace banyan::kernels
