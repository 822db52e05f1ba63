// The tile kernel for processors without bf16 products: fp32 multiply-adds over the packed layout,
// depth in ascending order, so a row's bits depend on the row alone here too.
#include <cstdint>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kRows = 4;  // rows that share one pass over b

// kRows rows of a times kLanes columns.
template <int64_t kR>
BANYAN_INLINE void multiply_rows(const uint16_t* a,
                                 int64_t lda,
                                 const uint32_t* b,
                                 int64_t depth,
                                 bool add,
                                 float* c,
                                 int64_t ldc) {
  float sum[kR][kLanes];
  for (int64_t r = 0; r < kR; ++r) {
    for (int64_t l = 0; l < kLanes; ++l) sum[r][l] = add ? c[r * ldc + l] : 0.0f;
  }
  for (int64_t k = 0; k < depth; k += 2) {
    const uint32_t* pairs = b + (k / 2) * kPanel;
    for (int64_t r = 0; r < kR; ++r) {
      const float even = bf16_to_f32(a[r * lda + k]);
      const float odd = bf16_to_f32(a[r * lda + k + 1]);
      for (int64_t l = 0; l < kLanes; ++l) {
        const float low = std::bit_cast<float>(pairs[l] << 16);
        const float high = std::bit_cast<float>(pairs[l] & 0xffff0000u);
        sum[r][l] = fma(odd, high, fma(even, low, sum[r][l]));
      }
    }
  }
  for (int64_t r = 0; r < kR; ++r) {
    for (int64_t l = 0; l < kLanes; ++l) c[r * ldc + l] = sum[r][l];
  }
}

BANYAN_MULTIVERSION
void multiply(const uint16_t* a,
              int64_t lda,
              int64_t rows,
              const uint32_t* b,  // two bf16 of neighbouring depth in one word
              int64_t depth,
              int64_t columns,
              bool add,
              float* c,
              int64_t ldc) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      multiply_rows<kRows>(a + row * lda, lda, b + column, depth, add, c + row * ldc + column, ldc);
    }
    for (; row < rows; ++row) {
      multiply_rows<1>(a + row * lda, lda, b + column, depth, add, c + row * ldc + column, ldc);
    }
  }
}

}  // namespace

void gemm_tile_portable(const RowTile& a,
                        const BFloat16* b,
                        int64_t depth,
                        int64_t columns,
                        bool add,
                        float* c,
                        int64_t ldc) {
  multiply(reinterpret_cast<const uint16_t*>(a.data),
           a.ld,
           a.rows,
           reinterpret_cast<const uint32_t*>(b),
           depth,
           columns,
           add,
           c,
           ldc);
}

}  // namespace banyan::kernels
