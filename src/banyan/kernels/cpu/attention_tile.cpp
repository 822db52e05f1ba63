// Packing of key/value tiles and the small matrix product over them; layouts in the header.
#include "banyan/kernels/cpu/attention_tile.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "banyan/kernels/cpu/bf16_product.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

// Two bf16 neighbours of one row, moved as one word.
BANYAN_INLINE uint32_t load_pair(const uint16_t* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return pair;
}

BANYAN_INLINE void store_pair(uint16_t* p, uint32_t pair) { std::memcpy(p, &pair, sizeof(pair)); }

// True if the first rows of a product have the same bits whether it has 4, 8, 12 or 16 rows.
bool few_rows_keep_bits() {
  constexpr int64_t kDim = 64;
  std::vector<uint16_t> a(kRowStep * kDim);
  std::vector<uint16_t> b(kTileTokens * kDim);
  uint32_t state = 1;
  const auto draw = [&] {  // in [-1, 1)
    state = state * 1664525u + 1013904223u;
    return f32_to_bf16(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
  };
  std::generate(a.begin(), a.end(), draw);
  std::generate(b.begin(), b.end(), draw);
  std::vector<float> wanted(kRowStep * kTileTokens);
  std::vector<float> got(kRowStep * kTileTokens);
  tile_gemm(kRowStep, kTileTokens, kDim, /*accumulate=*/false, a.data(), b.data(), wanted.data());
  bool same = true;
  for (int64_t rows = 4; rows < kRowStep; rows += 4) {
    tile_gemm(rows, kTileTokens, kDim, /*accumulate=*/false, a.data(), b.data(), got.data());
    same = same && std::memcmp(got.data(), wanted.data(), rows * kTileTokens * sizeof(float)) == 0;
  }
  gemm_release();
  return same;
}

}  // namespace

BANYAN_MULTIVERSION
void multiply_plain(int64_t m,
                    int64_t n,
                    int64_t k,
                    bool accumulate,
                    const uint16_t* __restrict a,
                    int64_t lda,
                    const uint16_t* __restrict b,
                    float* __restrict c,
                    int64_t ld) {
  for (int64_t i = 0; i < m; ++i) {
    float* row = c + i * ld;
    if (!accumulate) std::fill(row, row + n, 0.0f);
    for (int64_t pair = 0; pair < k / 2; ++pair) {
      const float a0 = bf16_to_f32(a[i * lda + 2 * pair]);
      const float a1 = bf16_to_f32(a[i * lda + 2 * pair + 1]);
      const uint16_t* columns = b + pair * 2 * ld;
      for (int64_t j = 0; j < n; ++j) {
        row[j] =
            fma(a1, bf16_to_f32(columns[2 * j + 1]), fma(a0, bf16_to_f32(columns[2 * j]), row[j]));
      }
    }
  }
}

void tile_gemm_portable(const TileGemm& g) {
  multiply_plain(g.m, g.n, g.k, g.accumulate, g.a, g.lda, g.b, g.c, g.ld);
}

// 8 pairs of 8 rows, transposed: out[i * stride] holds pair i of the rows, side by side. The stages
// swap halves, quarters and neighbours of the compiler's vectors (GCC and clang).
BANYAN_INLINE void transpose_pairs(const uint16_t* const* rows,
                                   int64_t pair,
                                   int64_t stride,
                                   uint16_t* out) {
  using Eight = uint32_t __attribute__((vector_size(32)));
  Eight a[8];
  Eight b[8];
  for (int64_t i = 0; i < 8; ++i) std::memcpy(&a[i], rows[i] + 2 * pair, sizeof(Eight));
  for (int64_t i = 0; i < 8; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int64_t i = 0; i < 8; i += 4) {
    for (int64_t j = i; j < i + 2; ++j) {
      a[j] = __builtin_shufflevector(b[j], b[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[j + 2] = __builtin_shufflevector(b[j], b[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int64_t i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int64_t i = 0; i < 8; ++i) std::memcpy(out + i * stride, &b[i], sizeof(Eight));
}

BANYAN_MULTIVERSION
void pack_columns(
    const uint16_t* const* rows, int64_t n, int64_t width, int64_t head_dim, uint16_t* out) {
  const int64_t pairs = head_dim / 2;
  for (int64_t first = 0; first < width; first += 8) {
    const int64_t last = std::min(first + 8, width);
    int64_t pair = 0;
    if (first + 8 <= n) {
      for (; pair + 8 <= pairs; pair += 8) {
        transpose_pairs(rows + first, pair, 2 * width, out + (pair * width + first) * 2);
      }
    }
    const int64_t filled = std::clamp<int64_t>(n, first, last);
    for (; pair < pairs; ++pair) {
      uint16_t* line = out + pair * 2 * width;
      for (int64_t p = first; p < filled; ++p) {
        store_pair(line + 2 * p, load_pair(rows[p] + 2 * pair));
      }
      for (int64_t p = filled; p < last; ++p) store_pair(line + 2 * p, 0);
    }
  }
}

BANYAN_MULTIVERSION
void interleave_rows(const uint16_t* __restrict even,
                     const uint16_t* __restrict odd,
                     int64_t head_dim,
                     uint16_t* __restrict out) {
  for (int64_t d = 0; d < head_dim; ++d) {
    const uint32_t pair = static_cast<uint32_t>(even[d]) | static_cast<uint32_t>(odd[d]) << 16;
    store_pair(out + 2 * d, pair);
  }
}

void pack_pairs(
    const uint16_t* const* rows, int64_t n, int64_t width, int64_t head_dim, uint16_t* out) {
  const int64_t whole = n / 2;
  for (int64_t pair = 0; pair < whole; ++pair) {
    interleave_rows(rows[2 * pair], rows[2 * pair + 1], head_dim, out + pair * 2 * head_dim);
  }
  uint16_t* rest = out + whole * 2 * head_dim;
  std::memset(rest, 0, static_cast<size_t>(width / 2 - whole) * 2 * head_dim * sizeof(uint16_t));
  if (n % 2 == 1) {
    for (int64_t d = 0; d < head_dim; ++d) rest[2 * d] = rows[n - 1][d];
  }
}

// Half `odd` of every word of `pairs` becomes the value.
BANYAN_MULTIVERSION
void write_halves(const uint16_t* __restrict value,
                  int64_t head_dim,
                  bool odd,
                  uint32_t* __restrict pairs) {
  const uint32_t kept = odd ? 0x0000ffffu : 0xffff0000u;
  const int shift = odd ? 16 : 0;
  for (int64_t d = 0; d < head_dim; ++d) {
    pairs[d] = (pairs[d] & kept) | static_cast<uint32_t>(value[d]) << shift;
  }
}

void write_position(const uint16_t* key,
                    const uint16_t* value,
                    int64_t position,
                    int64_t head_dim,
                    uint16_t* tile) {
  for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
    store_pair(tile + (pair * kTileTokens + position) * 2, load_pair(key + 2 * pair));
  }
  uint16_t* values = tile + kTileTokens * head_dim;
  if (position == 0) std::memset(values, 0, kTileTokens * head_dim * sizeof(uint16_t));
  write_halves(value,
               head_dim,
               position % 2 == 1,
               reinterpret_cast<uint32_t*>(values + position / 2 * 2 * head_dim));
}

void tile_gemm(const TileGemm& g) {
  if (!native_gemm_available()) {
    tile_gemm_portable(g);
  } else if (row_step() == 1) {
    bf16_product({.a = reinterpret_cast<const at::BFloat16*>(g.a),
                  .lda = g.lda,
                  .rows = g.m,
                  .b = reinterpret_cast<const at::BFloat16*>(g.b),
                  .ldb = g.ld,
                  .depth = g.k,
                  .columns = g.n,
                  .add = g.accumulate,
                  .c = g.c,
                  .ldc = g.ld});
  } else {
    at::native::cpublas::brgemm(g.m,
                                g.n,
                                g.k,
                                g.lda,
                                g.ld,
                                g.ld,
                                g.accumulate,
                                reinterpret_cast<const at::BFloat16*>(g.a),
                                reinterpret_cast<const at::BFloat16*>(g.b),
                                g.c,
                                /*is_vnni=*/true);
  }
}

int64_t padded_rows(int64_t rows) {
  if (row_step() == 1) return rows;
  static const int64_t few_step = few_rows_keep_bits() ? 4 : kRowStep;
  return round_up(rows, rows < kRowStep ? few_step : kRowStep);
}

int64_t padded_columns(int64_t columns, int64_t width) { return row_step() == 1 ? columns : width; }

}  // namespace banyan::kernels
