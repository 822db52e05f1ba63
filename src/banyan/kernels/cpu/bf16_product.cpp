// Register tiles; the scheme is in the header.
#include "banyan/kernels/cpu/bf16_product.h"

#include <algorithm>

#include "banyan/core/error.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

namespace banyan::kernels {
namespace {

using c10::BFloat16;

constexpr int64_t kRows = 6;      // 24 accumulators, 4 vectors of b, one of a
constexpr int64_t kVectors = 4;   // of 16 columns
constexpr int64_t kColumns = 64;  // of a register tile
constexpr int64_t kLine = 64;     // bytes of a cache line

// Memory wanted next: kLines lines for each pair of the depth, `step` bytes apart.
struct Ahead {
  const char* at = nullptr;
  int64_t step = 0;
};

// Rows x (16 Vectors) of c; the last vector has the columns of `mask` alone if kMasked.
template <int kR, int kV, int kLines, bool kMasked>
void register_tile(
    const Bf16Product& p, int64_t row, int64_t column, __mmask16 mask, const Ahead& ahead) {
  const int64_t pairs = p.depth / 2;
  const BFloat16* a = p.a + row * p.lda;
  const BFloat16* b = p.b + 2 * column;
  float* c = p.c + row * p.ldc + column;
  const auto masked = [](int v) { return kMasked && v == kV - 1; };
  __m512 sum[kR][kV];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  const char* next = ahead.at;
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh right[kV];
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      const BFloat16* from = b + 32 * v;
      right[v] = reinterpret_cast<__m512bh>(masked(v) ? _mm512_maskz_loadu_epi32(mask, from)
                                                      : _mm512_loadu_si512(from));
      asm("" : "+v"(right[v]));  // loaded once, not for every row
    }
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) _mm_prefetch(next + line * kLine, _MM_HINT_T1);
    next += ahead.step;
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, a + r * p.lda + 2 * k, sizeof(pair));
      const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 8
      for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
    }
    b += 2 * p.ldb;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      float* to = c + r * p.ldc + 16 * v;
      if (masked(v)) {
        if (p.add) sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, sum[r][v]);
      } else {
        if (p.add) sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_loadu_ps(to));
        _mm512_storeu_ps(to, sum[r][v]);
      }
    }
  }
}

using Tile = void (*)(const Bf16Product&, int64_t, int64_t, __mmask16, const Ahead&);

template <int kV, int kLines, bool kMasked>
constexpr Tile kByRows[kRows + 1] = {nullptr,
                                     register_tile<1, kV, kLines, kMasked>,
                                     register_tile<2, kV, kLines, kMasked>,
                                     register_tile<3, kV, kLines, kMasked>,
                                     register_tile<4, kV, kLines, kMasked>,
                                     register_tile<5, kV, kLines, kMasked>,
                                     register_tile<6, kV, kLines, kMasked>};

template <int kLines, bool kMasked>
Tile tile_for(int64_t rows, int64_t vectors) {
  switch (vectors) {
    case 1:
      return kByRows<1, kLines, kMasked>[rows];
    case 2:
      return kByRows<2, kLines, kMasked>[rows];
    case 3:
      return kByRows<3, kLines, kMasked>[rows];
    default:
      return kByRows<4, kLines, kMasked>[rows];
  }
}

Tile tile_for(int64_t rows, int64_t vectors, int64_t lines, bool is_masked) {
  if (is_masked) return tile_for<0, true>(rows, vectors);
  switch (lines) {
    case 0:
      return tile_for<0, false>(rows, vectors);
    case 1:
      return tile_for<1, false>(rows, vectors);
    case 2:
      return tile_for<2, false>(rows, vectors);
    default:
      return tile_for<4, false>(rows, vectors);
  }
}

// Lines for each pair, as there are tiles for.
int64_t lines_of(int64_t step) { return step > 2 * kLine ? 4 : (step + kLine - 1) / kLine; }

}  // namespace

}  // namespace banyan::kernels

#pragma GCC pop_options

namespace banyan::kernels {

bool bf16_product_available() {
  static const bool available =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return available;
}

void bf16_product(const Bf16Product& p) {
  const int64_t pairs = p.depth / 2;
  const int64_t blocks = (p.rows + kRows - 1) / kRows;
  // Spread over all the pairs that are multiplied, in steps that leave no line out.
  const int64_t steps = std::max<int64_t>(pairs * blocks, 1);
  const bool queued = p.then != nullptr && !p.then->empty();
  int64_t step = p.ahead == nullptr ? 0 : (p.ahead_bytes + steps - 1) / steps;
  if (queued && step > 0) step = std::max(step, kLine);  // so that blocks are left for the queue
  for (int64_t column = 0; column < p.columns; column += kColumns) {
    const int64_t columns = std::min(kColumns, p.columns - column);
    const int64_t vectors = (columns + 15) / 16;
    const bool is_masked = columns % 16 != 0;
    const auto mask = static_cast<__mmask16>(is_masked ? (1u << columns % 16) - 1u : 0xffffu);
    Ahead ahead{static_cast<const char*>(p.ahead), step};
    int64_t left = column == 0 ? p.ahead_bytes : 0;
    int64_t row = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t rows = (p.rows - row + blocks - block - 1) / (blocks - block);
      const bool before_queue = left > 0;
      if (!before_queue) {
        // A line for every other pair: at one for each, reading the panel itself is held up.
        const FetchQueue::Range range =
            queued ? p.then->take(pairs * kLine / 2) : FetchQueue::Range{};
        ahead = {range.at, (range.bytes + pairs - 1) / std::max<int64_t>(pairs, 1)};
      }
      tile_for(rows, vectors, lines_of(ahead.step), is_masked)(p, row, column, mask, ahead);
      row += rows;
      if (before_queue) {
        ahead.at += step * pairs;
        left -= step * pairs;
      }
    }
  }
}

}  // namespace banyan::kernels

#else

namespace banyan::kernels {

bool bf16_product_available() { return false; }

void bf16_product(const Bf16Product&) {
  BANYAN_ASSERT(false, "bf16_product: the processor has no avx512_bf16");
}

}  // namespace banyan::kernels

#endif
