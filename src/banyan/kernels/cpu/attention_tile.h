// Tiles of keys and values, the unit that attention reads in training and in rollout alike.
//
// A tile holds kTileTokens consecutive path positions of one kv head, bf16, positions that nothing
// has been written to zero, in the two forms that brgemm wants as its right operand (pairs of
// consecutive rows of B side by side, "VNNI"):
//   keys    [D / 2][64][2]   element (d, p) at (d / 2) * 128 + 2 p + d % 2     B of S = Q Kᵀ
//   values  [64 / 2][D][2]   element (p, d) at (p / 2) * 2 D + 2 d + p % 2     B of O = P V
// A page of the rollout's pool is one tile per kv head.
#pragma once

#include <bit>
#include <cstdint>

#include "banyan/kernels/cpu/multiversion.h"

namespace banyan::kernels {

inline constexpr int64_t kTileTokens = 64;

// bf16 elements of one tile, keys and values.
constexpr int64_t tile_elements(int64_t head_dim) { return 2 * kTileTokens * head_dim; }

// bf16 of a number, to nearest even; the NaN that arithmetic gives stays one. Cheaper than
// f32_to_bf16, which keeps every NaN.
BANYAN_INLINE uint16_t round_number(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Row pointers rows[0..n) of head_dim bf16 each -> [head_dim / 2][width][2]; columns n..width are
// zero.
void pack_columns(
    const uint16_t* const* rows, int64_t n, int64_t width, int64_t head_dim, uint16_t* out);

// The same rows -> [width / 2][head_dim][2]; rows n..width are zero. width is even.
void pack_pairs(
    const uint16_t* const* rows, int64_t n, int64_t width, int64_t head_dim, uint16_t* out);

// Writes one position of a tile. Position 0 also zeroes the values of the others, so that what an
// earlier owner of the memory left there (a NaN, say) meets no probability of zero.
void write_position(
    const uint16_t* key, const uint16_t* value, int64_t position, int64_t head_dim, uint16_t* tile);

struct TileGemm {
  int64_t m = 0;
  int64_t n = 0;  // at most ld
  int64_t k = 0;  // even
  bool accumulate = false;
  const uint16_t* a = nullptr;  // [M, K], row stride lda
  int64_t lda = 0;
  const uint16_t* b = nullptr;  // [K / 2][ld][2]
  float* c = nullptr;           // [M, N], row stride ld
  int64_t ld = 0;
};

// C [M, N] fp32 = or += A [M, K] bf16 times the first N columns of B. The bits of an element depend
// on its row of A and its column of B alone. The kernel of gemm.h, or a plain loop in ascending K.
void tile_gemm(const TileGemm& gemm);
// The plain loop.
void tile_gemm_portable(const TileGemm& gemm);

// Products of full rows and columns: A, B and C are contiguous.
inline void tile_gemm(int64_t m,
                      int64_t n,
                      int64_t k,
                      bool accumulate,
                      const uint16_t* a,
                      const uint16_t* b,
                      float* c) {
  tile_gemm({.m = m,
             .n = n,
             .k = k,
             .accumulate = accumulate,
             .a = a,
             .lda = k,
             .b = b,
             .c = c,
             .ld = n});
}

// Rows that a product over `rows` rows takes, so that few shapes exist where brgemm compiles one
// for each: the next multiple of 16, and below that of 4 where the processor is seen (once, on a
// small product) to give a row the same bits then. Elsewhere `rows`.
int64_t padded_rows(int64_t rows);
// Likewise for columns: `columns` or the whole `width`.
int64_t padded_columns(int64_t columns, int64_t width);

}  // namespace banyan::kernels
