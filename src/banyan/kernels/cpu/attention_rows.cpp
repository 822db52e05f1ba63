// Blocks of up to 6 rows; the columns that one of the block sees, in vectors of 16.
#include "banyan/kernels/cpu/attention_rows.h"

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/attention_tile.h"
#include "banyan/kernels/cpu/bf16_product.h"
#include "banyan/kernels/cpu/exp_lanes.h"
#include "banyan/kernels/cpu/gemm.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

// GCC 12's own intrinsics start from a register that is undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

namespace banyan::kernels {
namespace {

constexpr int kRows = 6;

// Lanes::sum of lanes.h.
inline float sum_lanes(__m512 lanes) {
  const __m256 eight =
      _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float max_lanes(__m512 lanes) {
  const __m256 eight =
      _mm256_max_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m512bh pair_of(const uint16_t* at) {
  int32_t pair;
  __builtin_memcpy(&pair, at, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// kR rows times kV vectors of columns of b [pairs][ld][2]. With kAhead, four cache lines at `ahead`
// and onwards are fetched with each pair.
template <int kR, int kV, bool kAhead>
inline void multiply(const uint16_t* a,
                     int64_t lda,
                     const uint16_t* b,
                     int64_t ld,
                     int64_t pairs,
                     const uint16_t* ahead,
                     __m512 (&sum)[kR][kV]) {
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh right[kV];
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 2 * k * ld + 32 * v));
      asm("" : "+v"(right[v]));  // loaded once, not for every row
    }
    if (kAhead) {
#pragma GCC unroll 8
      for (int line = 0; line < 4; ++line) {
        _mm_prefetch(ahead + 128 * k + 32 * line, _MM_HINT_T1);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      const __m512bh left = pair_of(a + r * lda + 2 * k);
#pragma GCC unroll 8
      for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
    }
  }
}

// Scores of the rows to probabilities, bf16 [kR, 64], and the rows' alphas. Step by step for all
// rows, so that the latency of one row's reductions is hidden behind the others'.
template <int kR, int kV, bool kFull>
inline void softmax(
    const AttendRows& w, int64_t first, __m512 (&s)[kR][kV], uint16_t* probs, float (&alpha)[kR]) {
  const __m512 factor = _mm512_set1_ps(w.scale);
  __m512 largest[kR];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      s[r][v] = _mm512_mul_ps(s[r][v], factor);
      if (!kFull) {
        const int32_t seen = w.valid[first + r] - 16 * v;
        const auto mask = static_cast<__mmask16>(seen >= 16  ? 0xffff
                                                 : seen <= 0 ? 0
                                                             : (1 << seen) - 1);
        s[r][v] = _mm512_mask_blend_ps(mask, _mm512_set1_ps(-__builtin_inff()), s[r][v]);
      }
      largest[r] = v == 0 ? s[r][v] : _mm512_max_ps(largest[r], s[r][v]);
    }
  }
  float new_max[kR];
  __m128 fall[2] = {_mm_setzero_ps(), _mm_setzero_ps()};  // old maximum - new one, four rows each
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
    const float old_max = w.max[first + r];
    const float tile_max = max_lanes(largest[r]);
    new_max[r] = old_max > tile_max ? old_max : tile_max;
    w.max[first + r] = new_max[r];
    const __m128 value = _mm_set_ss(old_max - new_max[r]);
    fall[r / 4] = r % 4 == 0   ? _mm_insert_ps(fall[r / 4], value, 0x00)
                  : r % 4 == 1 ? _mm_insert_ps(fall[r / 4], value, 0x10)
                  : r % 4 == 2 ? _mm_insert_ps(fall[r / 4], value, 0x20)
                               : _mm_insert_ps(fall[r / 4], value, 0x30);
  }
  const __m512 falls = _mm512_castps256_ps512(_mm256_set_m128(fall[1], fall[0]));
  alignas(32) float alphas[8];
  _mm256_store_ps(alphas, _mm512_castps512_ps256(exp_below(falls)));
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
    const __m512 shift = _mm512_set1_ps(new_max[r]);
    __m512 total;
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      const __m512 p = exp_below(_mm512_sub_ps(s[r][v], shift));
      const __m256bh rounded = _mm512_cvtneps_pbh(p);
      __builtin_memcpy(probs + r * kTileTokens + 16 * v, &rounded, sizeof(rounded));
      total = v == 0 ? p : _mm512_add_ps(total, p);
    }
    largest[r] = total;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
    alpha[r] = alphas[r];
    w.sum[first + r] = __builtin_fmaf(w.sum[first + r], alpha[r], sum_lanes(largest[r]));
  }
}

// O = alpha O + (P V + 0), kV vectors of columns.
template <int kR, int kV, bool kAhead>
inline void add_values(const uint16_t* probs,
                       const uint16_t* values,
                       int64_t dim,
                       int64_t pairs,
                       const uint16_t* ahead,
                       const float (&alpha)[kR],
                       float* out) {
  __m512 sum[kR][kV];
  multiply<kR, kV, kAhead>(probs, kTileTokens, values, dim, pairs, ahead, sum);
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
    const __m512 a = _mm512_set1_ps(alpha[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      float* to = out + r * dim + 16 * v;
      const __m512 product = _mm512_add_ps(sum[r][v], _mm512_setzero_ps());
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), a, product));
    }
  }
}

template <int kR, int kV, bool kFull, bool kAhead>
void block(const AttendRows& w, int64_t first, int64_t most) {
  const int64_t dim = w.head_dim;
  alignas(64) uint16_t probs[kR * kTileTokens];
  float alpha[kR];
  {
    __m512 scores[kR][kV];
    multiply<kR, kV, kAhead>(w.q + first * dim, dim, w.tile, kTileTokens, dim / 2, w.next, scores);
    softmax<kR, kV, kFull>(w, first, scores, probs, alpha);
  }
  const uint16_t* values = w.tile + kTileTokens * dim;
  const int64_t pairs = (most + 1) / 2;
  float* out = w.out + first * dim;
  int64_t column = 0;
  for (; column + 64 <= dim; column += 64) {
    // 64 columns of 64 positions are as many lines as are fetched here.
    add_values<kR, 4, kAhead>(probs,
                              values + 2 * column,
                              dim,
                              pairs,
                              w.next + kTileTokens * (dim + column),
                              alpha,
                              out + column);
  }
  for (; column < dim; column += 16) {
    add_values<kR, 1, false>(probs, values + 2 * column, dim, pairs, nullptr, alpha, out + column);
  }
}

using Block = void (*)(const AttendRows&, int64_t, int64_t);

template <int kV, bool kFull, bool kAhead>
constexpr Block kByRows[kRows + 1] = {nullptr,
                                      block<1, kV, kFull, kAhead>,
                                      block<2, kV, kFull, kAhead>,
                                      block<3, kV, kFull, kAhead>,
                                      block<4, kV, kFull, kAhead>,
                                      block<5, kV, kFull, kAhead>,
                                      block<6, kV, kFull, kAhead>};

Block block_for(int64_t rows, int64_t vectors, bool full, bool ahead) {
  if (full) return ahead ? kByRows<4, true, true>[rows] : kByRows<4, true, false>[rows];
  switch (vectors) {
    case 1:
      return ahead ? kByRows<1, false, true>[rows] : kByRows<1, false, false>[rows];
    case 2:
      return kByRows<2, false, false>[rows];
    case 3:
      return kByRows<3, false, false>[rows];
    default:
      return ahead ? kByRows<4, false, true>[rows] : kByRows<4, false, false>[rows];
  }
}

}  // namespace
}  // namespace banyan::kernels

#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace banyan::kernels {

bool attend_rows_available(int64_t head_dim) {
  return native_gemm_available() && row_step() == 1 && head_dim % 16 == 0;
}

void attend_rows(const AttendRows& w) {
  const int64_t blocks = (w.rows + kRows - 1) / kRows;
  int64_t row = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t rows = (w.rows - row + blocks - b - 1) / (blocks - b);
    int32_t most = 0;
    int32_t least = kTileTokens;
    for (int64_t r = row; r < row + rows; ++r) {
      most = most < w.valid[r] ? w.valid[r] : most;
      least = least > w.valid[r] ? w.valid[r] : least;
    }
    const bool ahead = b == 0 && w.next != nullptr;
    block_for(rows, (most + 15) / 16, least == kTileTokens, ahead)(w, row, most);
    row += rows;
  }
}

}  // namespace banyan::kernels

#else

namespace banyan::kernels {

bool attend_rows_available(int64_t) { return false; }

void attend_rows(const AttendRows&) {
  BANYAN_ASSERT(false, "attend_rows: the processor has no avx512_bf16");
}

}  // namespace banyan::kernels

#endif
