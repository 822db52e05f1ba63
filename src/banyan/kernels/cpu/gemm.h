// bf16 matrix products with fp32 accumulation whose row bits depend on the row alone.
//
// Packed layout of B [depth, columns] (y = x B): panels of kPanel columns,
//   packed[columns / 64][depth / 2][64][2]
// where the last index runs over two neighbours in depth (VNNI order). The last panel is filled
// with zero columns and an odd depth with one zero row. A panel is contiguous, so a depth range of
// it is a pointer offset.
//
// An output element is one dot product over the whole depth, in one order, in one call of the tile
// kernel. Row tiles are filled up with zero rows to a multiple of row_step(). Tiling and threads
// decide who computes an element, never how.
//
// The tile kernel, chosen once for the process and used by every kernel that multiplies (head and
// attention too): oneDNN's brgemm through ATen with AMX, register tiles of our own with avx512_bf16
// (bf16_product.h), else a plain loop in fp32 over the same layout (gemm_portable.cpp). The
// environment variable BANYAN_GEMM_KERNEL=brgemm|registers|portable chooses instead, where the
// processor can; another word is an error at the first product.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "banyan/kernels/cpu/fetch_queue.h"
#include "banyan/kernels/cpu/scratch.h"

namespace banyan::kernels {

using c10::BFloat16;

inline constexpr int64_t kPanel = 64;    // columns of a panel
inline constexpr int64_t kRowTile = 64;  // most rows of one tile
inline constexpr int64_t kRowStep = 16;  // the largest row_step()

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// A packed B. Borrows its data.
struct Panels {
  const BFloat16* data = nullptr;
  int64_t depth = 0;
  int64_t columns = 0;

  int64_t count() const { return divide_up(columns, kPanel); }
  int64_t padded_depth() const { return round_up(depth, 2); }
  const BFloat16* panel(int64_t p) const { return data + p * padded_depth() * kPanel; }
};

constexpr int64_t packed_size(int64_t depth, int64_t columns) {
  return round_up(depth, 2) * round_up(columns, kPanel);
}

// True if the processor multiplies bf16: the tile kernel is not the portable loop.
bool native_gemm_available();
// For `banyan doctor`: "brgemm (amx)", "register tiles (avx512_bf16)", "brgemm (avx512_bf16)" or
// "portable loop".
const char* gemm_kernel_name();
// Rows of a tile are computed in multiples of this: 16 for brgemm (few shapes are compiled at run
// time), else 1.
int64_t row_step();
// True if register tiles are the kernel, so that blocks of matmul_block.h have the same bits.
bool has_register_tiles();
// Tests: the portable loop for the life of the object, whatever the processor has. Not while
// another thread computes.
class PortableGemm {
 public:
  PortableGemm();
  ~PortableGemm();
};

// w [out, in] fp32 -> B = Wᵀ (depth = in, columns = out), rounded to nearest even. Parallel.
void pack_weight(const float* w, int64_t out, int64_t in, BFloat16* packed);
// w [out, in] fp32 -> B = W (depth = out, columns = in).
void pack_weight_transposed(const float* w, int64_t out, int64_t in, BFloat16* packed);
// Row `row` of W [out, in], read back from either form.
void unpack_row(const Panels& weight, int64_t row, BFloat16* values);
void unpack_row_transposed(const Panels& weight_t, int64_t row, BFloat16* values);

// c [rows, columns] = a [rows, depth] B (+ bias [columns], added in fp32), rounded; with a residual
// [rows, columns] (row stride ldc) that is added to the rounded product, and the sum is rounded.
// Parallel; bias and residual may be null.
void gemm(const BFloat16* a,
          int64_t lda,
          int64_t rows,
          const Panels& b,
          const BFloat16* bias,
          BFloat16* c,
          int64_t ldc,
          const BFloat16* residual = nullptr);
void gemm(const BFloat16* a, int64_t lda, int64_t rows, const Panels& b, float* c, int64_t ldc);

// grad [out, in] fp32 += dyᵀ x, dy [rows, out], x [rows, in]. Rows are walked in chunks in
// ascending order, cut by the number of rows alone; each output tile has one writer. Parallel.
void weight_gradient(const BFloat16* dy,
                     int64_t ld_dy,
                     const BFloat16* x,
                     int64_t ld_x,
                     int64_t rows,
                     int64_t out,
                     int64_t in,
                     float* grad,
                     int64_t ld_grad);

// sums [columns] fp32 += column sums of dy [rows, columns], rows in ascending order. Parallel.
void add_column_sums(const BFloat16* dy, int64_t ld, int64_t rows, int64_t columns, float* sums);

// --- Parts, for kernels that fuse something around the product ---

// Rows of A in the form that gemm_tile reads.
struct RowTile {
  const BFloat16* data = nullptr;
  int64_t ld = 0;
  int64_t rows = 0;  // multiple of row_step()
};
// `rows` <= kRowTile rows at `a`: in place where possible, else a copy in `scratch` with zero rows
// (and, for an odd depth, a zero column) appended.
RowTile row_tile(const BFloat16* a, int64_t lda, int64_t rows, int64_t depth, Scratch& scratch);

// Memory that is wanted soon: fetched into the second-level cache during a product, where the
// kernel can.
struct Ahead {
  const void* at = nullptr;
  int64_t bytes = 0;
  FetchQueue* then = nullptr;  // behind it, as far as the product lasts; or null
};

// c [rows, columns] (+)= a [rows, depth] b, one thread. `b` points into a panel; rows is a multiple
// of row_step(), columns of 16 and at most kPanel, depth is even.
void gemm_tile(const RowTile& a,
               const BFloat16* b,
               int64_t depth,
               int64_t columns,
               bool add,
               float* c,
               int64_t ldc,
               const Ahead& ahead = {});
void gemm_tile_portable(const RowTile& a,
                        const BFloat16* b,
                        int64_t depth,
                        int64_t columns,
                        bool add,
                        float* c,
                        int64_t ldc);
// Rows that are packed together; a multiple of both the rows of a group and kRowStep.
inline constexpr int64_t kPackRows = 96;
// Rows of an A that stand as columns, packed for add_product with depth `whole` in all: in groups
// (matmul_block.h) for register tiles, else row by row. Where row `row` begins, a multiple of the
// rows of a group or of kRowStep; and, of any number, the values that so many rows take.
int64_t packed_rows_offset(int64_t row, int64_t whole);
// x [depth, rows] (row stride ld) -> depth [first, first + padded_depth) of `rows` rows, with zeros
// from `depth` on. first, padded_depth and whole are multiples of 32.
void pack_transposed_rows(const BFloat16* x,
                          int64_t ld,
                          int64_t depth,
                          int64_t rows,
                          int64_t padded_depth,
                          BFloat16* out,
                          int64_t whole,
                          int64_t first = 0);
// c [rows, columns] += a b: rows so packed, the first `depth` (even) of the panel b, columns <=
// kPanel.
void add_product(const BFloat16* a,
                 int64_t whole,
                 const BFloat16* b,
                 int64_t depth,
                 int64_t rows,
                 int64_t columns,
                 float* c,
                 int64_t ldc);
// Call on a thread that has finished its tiles (gives the AMX tile state back).
void gemm_release();

// x [rows, columns] (row stride ld) as panels over its rows, `stride` values apart: depth [first,
// first + padded_rows) of [depth / 2][64][2], with zero rows from `rows` on and zero columns up to
// a whole panel. first and padded_rows are even.
void pack_panels(const BFloat16* x,
                 int64_t ld,
                 int64_t rows,
                 int64_t columns,
                 int64_t padded_rows,
                 BFloat16* out,
                 int64_t stride,
                 int64_t first = 0);
// A stride for panels of this depth that are written side by side: they do not all begin in the
// same lines of a cache.
constexpr int64_t panel_stride(int64_t depth) { return kPanel * (depth + 2); }
// x [rows, columns] -> out [columns, rows], row stride ld_out, zeros up to `depth` entries
// (multiple of 32).
void transpose(const BFloat16* x,
               int64_t ld,
               int64_t rows,
               int64_t columns,
               int64_t depth,
               BFloat16* out,
               int64_t ld_out);
// c fp32 -> out bf16 with an optional bias in fp32 and an optional residual (row stride ld_out).
void store_bf16(const float* c,
                int64_t ldc,
                int64_t rows,
                int64_t columns,
                const BFloat16* bias,
                BFloat16* out,
                int64_t ld_out,
                const BFloat16* residual = nullptr);

}  // namespace banyan::kernels
