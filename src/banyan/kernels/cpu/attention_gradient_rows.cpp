// A product reads its left operand word by word (a word is a pair of bf16 neighbours in depth), so
// P and dS serve as they are and transposed: row r, pair k lies at a + r row + k pair.
#include "banyan/kernels/cpu/attention_gradient_rows.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/exp_lanes.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/multiversion.h"

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

constexpr int64_t kRows = 6;  // 24 accumulators, 4 vectors of b, one of a; even: rows come in pairs
constexpr int64_t kLine = 64;  // scores of a row in scratch memory

// c [rows, columns] = or += a b
struct Product {
  const void* a = nullptr;
  int64_t row = 0;              // bytes
  int64_t pair = 0;             // bytes
  const uint16_t* b = nullptr;  // [pairs][ldb][2]
  int64_t ldb = 0;
  int64_t pairs = 0;
  bool add = false;
  float* c = nullptr;
  int64_t ldc = 0;
};

template <int kR, int kV>
void block(const Product& p, int64_t column) {
  const char* a = static_cast<const char*>(p.a);
  const uint16_t* b = p.b + 2 * column;
  const int64_t row = p.row;
  const int64_t pair = p.pair;
  const int64_t step = 2 * p.ldb;
  __m512 sum[kR][kV];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t left = p.pairs; left > 0; --left) {
    __m512bh right[kV];
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 32 * v));
      asm("" : "+v"(right[v]));  // loaded once, not for every row
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      int32_t word;
      __builtin_memcpy(&word, a + r * row, sizeof(word));
      const auto every = reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
#pragma GCC unroll 8
      for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], every, right[v]);
    }
    a += pair;
    b += step;
  }
  float* c = p.c + column;
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      float* to = c + r * p.ldc + 16 * v;
      if (p.add) sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_loadu_ps(to));
      _mm512_storeu_ps(to, sum[r][v]);
    }
  }
}

using Block = void (*)(const Product&, int64_t);

template <int kV>
constexpr Block kByRows[kRows + 1] = {
    nullptr, block<1, kV>, block<2, kV>, block<3, kV>, block<4, kV>, block<5, kV>, block<6, kV>};

// columns: a multiple of 16.
void multiply(const Product& p, int64_t rows, int64_t columns) {
  int64_t column = 0;
  for (; column + 64 <= columns; column += 64) kByRows<4>[rows](p, column);
  switch ((columns - column) / 16) {
    case 1:
      return kByRows<1>[rows](p, column);
    case 2:
      return kByRows<2>[rows](p, column);
    case 3:
      return kByRows<3>[rows](p, column);
    default:
      return;
  }
}

BANYAN_INLINE __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Words [even bf16, odd bf16] of two halves that stand one after the other.
BANYAN_INLINE __m512i interleave(__m512i halves) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

// Two rows of scores to P and dS; vectors that neither sees become zeros. `seen`: keys that each
// row sees, 0 of a second row that does not exist.
void pair_scores(const GradientTile& tile,
                 int64_t row,
                 const int64_t (&seen)[2],
                 const float* scores,
                 const float* grad_probs,
                 const GradientScratch& out) {
  const int64_t width = tile.width();
  const int64_t odd = seen[1] > 0 ? 1 : 0;
  const __m512 scale = _mm512_set1_ps(tile.scale);
  const __m512 offset[2] = {_mm512_set1_ps(-tile.lse[row]), _mm512_set1_ps(-tile.lse[row + odd])};
  const __m512 mean[2] = {_mm512_set1_ps(tile.delta[row]), _mm512_set1_ps(tile.delta[row + odd])};
  uint32_t* prob_words = out.prob_words + row / 2 * width;
  uint32_t* grad_words = out.grad_words + row / 2 * width;
  uint16_t* grad_rows = out.grad_rows + row * width;
  const int64_t most = std::max(seen[0], seen[1]);
  int64_t first = 0;
  for (; first < most; first += 16) {
    __m512 p[2], ds[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __mmask16 mask = first_lanes(seen[i] - first);
      const int64_t at = i * odd * kLine + first;
      const __m512 s = _mm512_load_ps(scores + at);
      p[i] = _mm512_maskz_mov_ps(mask, exp_lanes(_mm512_fmadd_ps(s, scale, offset[i])));
      const __m512 fall = _mm512_sub_ps(_mm512_load_ps(grad_probs + at), mean[i]);
      ds[i] = _mm512_maskz_mul_ps(mask, p[i], fall);
    }
    const auto probs = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0]));
    const auto grads = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(ds[1], ds[0]));
    _mm512_storeu_si512(prob_words + first, interleave(probs));
    _mm512_storeu_si512(grad_words + first, interleave(grads));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_rows + first),
                        _mm512_castsi512_si256(grads));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_rows + width + first),
                        _mm512_extracti64x4_epi64(grads, 1));
  }
  for (; first < width; first += 16) {
    _mm512_storeu_si512(prob_words + first, _mm512_setzero_si512());
    _mm512_storeu_si512(grad_words + first, _mm512_setzero_si512());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_rows + first), _mm256_setzero_si256());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_rows + width + first),
                        _mm256_setzero_si256());
  }
}

// Keys that a row sees.
inline int64_t seen_by(const GradientTile& tile, int64_t row) {
  return row < tile.rows ? std::clamp<int64_t>(tile.first_seen + row, 0, tile.keys) : 0;
}

// sums [keys, D] += wordsᵀ pairs; a block of keys from the first pair of rows that sees one.
void add_transposed(const GradientTile& tile,
                    const uint32_t* words,
                    const uint16_t* pairs,
                    float* sums) {
  const int64_t width = tile.width();
  const int64_t dim = tile.head_dim;
  const int64_t all_pairs = divide_up(tile.rows, 2);
  int64_t key = 0;
  for (int64_t left = divide_up(tile.keys, kRows); left > 0; --left) {
    const int64_t keys = divide_up(tile.keys - key, left);
    const int64_t first = std::max<int64_t>(key + 1 - tile.first_seen, 0) / 2;
    if (first >= all_pairs) break;
    multiply({.a = words + first * width + key,
              .row = sizeof(uint32_t),
              .pair = width * static_cast<int64_t>(sizeof(uint32_t)),
              .b = pairs + first * 2 * dim,
              .ldb = dim,
              .pairs = all_pairs - first,
              .add = true,
              .c = sums + key * dim,
              .ldc = dim},
             keys,
             dim);
    key += keys;
  }
}

}  // namespace
}  // namespace banyan::kernels

#pragma GCC pop_options
#pragma GCC diagnostic pop

namespace banyan::kernels {

bool gradient_rows_available(int64_t head_dim) {
  return has_register_tiles() && head_dim % 16 == 0;
}

void key_gradients_in_registers(const GradientTile& tile,
                                const GradientScratch& scratch,
                                float* dk,
                                float* dv) {
  const int64_t width = tile.width();
  alignas(64) float scores[kRows * kLine];
  alignas(64) float grad_probs[kRows * kLine];
  for (int64_t row = 0; row < tile.rows; row += kRows) {
    const int64_t rows = std::min(kRows, tile.rows - row);
    const int64_t columns = round_up(seen_by(tile, row + rows - 1), 16);
    const auto rows_times = [&](const uint16_t* x, int64_t stride, const uint16_t* b, float* c) {
      multiply({.a = x + row * stride,
                .row = stride * static_cast<int64_t>(sizeof(uint16_t)),
                .pair = sizeof(uint32_t),
                .b = b,
                .ldb = width,
                .pairs = tile.head_dim / 2,
                .c = c,
                .ldc = kLine},
               rows,
               columns);
    };
    rows_times(tile.q, tile.q_stride, tile.key_columns, scores);
    rows_times(tile.grad_out, tile.grad_stride, tile.value_columns, grad_probs);
    for (int64_t r = 0; r < rows; r += 2) {
      pair_scores(tile,
                  row + r,
                  {seen_by(tile, row + r), seen_by(tile, row + r + 1)},
                  scores + r * kLine,
                  grad_probs + r * kLine,
                  scratch);
    }
  }
  add_transposed(tile, scratch.prob_words, tile.grad_pairs, dv);
  add_transposed(tile, scratch.grad_words, tile.q_pairs, dk);
}

void query_gradients_in_registers(const GradientTile& tile,
                                  const GradientScratch& scratch,
                                  bool add,
                                  float* dq) {
  const int64_t width = tile.width();
  const int64_t dim = tile.head_dim;
  int64_t row = 0;
  for (int64_t left = divide_up(tile.rows, kRows); left > 0; --left) {
    const int64_t rows = divide_up(tile.rows - row, left);
    multiply({.a = scratch.grad_rows + row * width,
              .row = width * static_cast<int64_t>(sizeof(uint16_t)),
              .pair = sizeof(uint32_t),
              .b = tile.key_pairs,
              .ldb = dim,
              .pairs = divide_up(seen_by(tile, row + rows - 1), 2),
              .add = add,
              .c = dq + row * dim,
              .ldc = dim},
             rows,
             dim);
    row += rows;
  }
}

}  // namespace banyan::kernels

#else

namespace banyan::kernels {

bool gradient_rows_available(int64_t) { return false; }

void key_gradients_in_registers(const GradientTile&, const GradientScratch&, float*, float*) {
  BANYAN_ASSERT(false, "key_gradients_in_registers: the processor has no avx512_bf16");
}

void query_gradients_in_registers(const GradientTile&, const GradientScratch&, bool, float*) {
  BANYAN_ASSERT(false, "query_gradients_in_registers: the processor has no avx512_bf16");
}

}  // namespace banyan::kernels

#endif
