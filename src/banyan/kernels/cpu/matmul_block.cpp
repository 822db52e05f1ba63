// Register tiles with an epilogue; the scheme is in the header. An element is one chain of dpbf16
// over the pairs of the depth in ascending order, from zero, as in bf16_product.cpp.
#include "banyan/kernels/cpu/matmul_block.h"

#include "banyan/core/error.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

// GCC 12 takes the undefined source of an unmasked intrinsic for a mistake of the caller.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

namespace banyan::kernels {
namespace {

using c10::BFloat16;

constexpr int64_t kRows = 6;     // 24 accumulators, 4 vectors of b, one of a
constexpr int64_t kPairs = 128;  // numbers of one pair of rows of a panel
constexpr int kLine = 64;        // bytes of a cache line

#define BANYAN_TILE inline __attribute__((always_inline))

// Calls store(r, v, sums) for each vector of 16 columns of a tile of kR rows.
template <int kR, int kV, typename Store>
BANYAN_TILE void tile(const MatmulBlock& block, int64_t row, const Store& store) {
  const BFloat16* a = block.a + row * block.lda;
  const BFloat16* b = block.b;
  const int64_t lda = block.lda;
  const int64_t pairs = block.depth / 2;
  __m512 sum[kR][kV];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh right[kV];
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) {
      right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 32 * v));
      asm("" : "+v"(right[v]));  // loaded once, not for every row
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, a + r * lda + 2 * k, sizeof(pair));
      const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 8
      for (int v = 0; v < kV; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
    }
    b += kPairs;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kV; ++v) store(r, v, sum[r][v]);
  }
}

// Fetches kR rows of kBytes at `to`, to be written.
template <int kR, int kBytes>
BANYAN_TILE void fetch(void* to, int64_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
    char* row = static_cast<char*>(to) + r * stride;
#pragma GCC unroll 8
    for (int at = 0; at < kBytes; at += kLine) __builtin_prefetch(row + at, /*rw=*/1);
  }
}

// As f32_to_bf16 (vecmath.h): to nearest even, NaN stays NaN.
BANYAN_TILE __m256i round_lanes(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}

BANYAN_TILE __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

BANYAN_TILE __m256i load_halves(const BFloat16* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

struct Adder {
  float* c;
  int64_t ldc;

  template <int kR, int kV>
  BANYAN_TILE void run(const MatmulBlock& block, int64_t row) const {
    float* to = c + row * ldc;
    const int64_t ld = ldc;
    fetch<kR, 64 * kV>(to, ld * static_cast<int64_t>(sizeof(float)));
    tile<kR, kV>(block, row, [=](int r, int v, __m512 sum) {
      float* at = to + r * ld + 16 * v;
      _mm512_storeu_ps(at, _mm512_add_ps(sum, _mm512_loadu_ps(at)));
    });
  }
};

template <bool kBias, bool kResidual>
struct Rounder {
  RoundedOutput output;

  template <int kR, int kV>
  BANYAN_TILE void run(const MatmulBlock& block, int64_t row) const {
    const RoundedOutput o = output;
    BFloat16* to = o.out + row * o.ld;
    const BFloat16* residual = kResidual ? o.residual + row * o.ld : nullptr;
    fetch<kR, 32 * kV>(to, o.ld * static_cast<int64_t>(sizeof(BFloat16)));
    tile<kR, kV>(block, row, [=](int r, int v, __m512 sum) {
      if (kBias) sum = _mm512_add_ps(sum, widen(load_halves(o.bias + 16 * v)));
      __m256i halves = round_lanes(sum);
      const int64_t at = r * o.ld + 16 * v;
      if (kResidual) {
        halves = round_lanes(_mm512_add_ps(widen(halves), widen(load_halves(residual + at))));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), halves);
    });
  }
};

template <typename Epilogue, int kR, int kV>
void run_tile(const Epilogue& epilogue, const MatmulBlock& block, int64_t row) {
  epilogue.template run<kR, kV>(block, row);
}

// Rows are cut into tiles of nearly the same height.
template <typename Epilogue, int kV>
void run_rows(const MatmulBlock& block, const Epilogue& epilogue) {
  using Tile = void (*)(const Epilogue&, const MatmulBlock&, int64_t);
  static constexpr Tile kByRows[kRows + 1] = {nullptr,
                                              run_tile<Epilogue, 1, kV>,
                                              run_tile<Epilogue, 2, kV>,
                                              run_tile<Epilogue, 3, kV>,
                                              run_tile<Epilogue, 4, kV>,
                                              run_tile<Epilogue, 5, kV>,
                                              run_tile<Epilogue, 6, kV>};
  const int64_t tiles = (block.rows + kRows - 1) / kRows;
  int64_t row = 0;
  for (int64_t left = tiles; left > 0; --left) {
    const int64_t rows = (block.rows - row + left - 1) / left;
    kByRows[rows](epilogue, block, row);
    row += rows;
  }
}

template <typename Epilogue>
void run(const MatmulBlock& block, const Epilogue& epilogue) {
  BANYAN_ASSERT(block.columns == 64 || block.columns == 32, "matmul_block: half panels");
  block.columns == 64 ? run_rows<Epilogue, 4>(block, epilogue)
                      : run_rows<Epilogue, 2>(block, epilogue);
}

}  // namespace

void matmul_add(const MatmulBlock& block, float* c, int64_t ldc) { run(block, Adder{c, ldc}); }

void matmul_round(const MatmulBlock& block, const RoundedOutput& output) {
  if (output.bias != nullptr && output.residual != nullptr) {
    run(block, Rounder<true, true>{output});
  } else if (output.bias != nullptr) {
    run(block, Rounder<true, false>{output});
  } else if (output.residual != nullptr) {
    run(block, Rounder<false, true>{output});
  } else {
    run(block, Rounder<false, false>{output});
  }
}

#undef BANYAN_TILE

}  // namespace banyan::kernels

#pragma GCC pop_options

#else

namespace banyan::kernels {

void matmul_add(const MatmulBlock&, float*, int64_t) {
  BANYAN_ASSERT(false, "matmul_add: the processor has no avx512_bf16");
}

void matmul_round(const MatmulBlock&, const RoundedOutput&) {
  BANYAN_ASSERT(false, "matmul_round: the processor has no avx512_bf16");
}

}  // namespace banyan::kernels

#endif
