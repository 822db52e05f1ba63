// Register tiles with an epilogue; the scheme is in the header. An element is one chain of dpbf16
// over the pairs of the depth in ascending order, from zero, as in bf16_product.cpp.
#include "banyan/kernels/cpu/matmul_block.h"

#include <algorithm>
#include <array>
#include <cstring>

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

constexpr int64_t kRows = kGroupRows;  // 24 accumulators, 4 vectors of b, one of a
constexpr int64_t kPairs = 128;        // numbers of one pair of rows of a panel
constexpr int kLine = 64;              // bytes of a cache line

#define BANYAN_TILE inline __attribute__((always_inline))

// Calls store(r, v, sums) for each vector of 16 columns of a tile of kR rows: of rows of A from
// `row`, or of the group from there.
template <int kR, int kV, bool kGroups, typename Store>
BANYAN_TILE void tile(const MatmulBlock& block, int64_t row, const Store& store) {
  const BFloat16* a = block.a + (kGroups ? row / kRows : row) * block.lda;
  const BFloat16* b = block.b;
  const int64_t lda = kGroups ? 2 : block.lda;
  const int64_t pair_step = kGroups ? 2 * kRows : 2;
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
      __builtin_memcpy(&pair, a + r * lda + k * pair_step, sizeof(pair));
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
  static constexpr bool kGroups = true;
  float* c;
  int64_t ldc;

  template <int kR, int kV>
  BANYAN_TILE void run(const MatmulBlock& block, int64_t row) const {
    float* to = c + row * ldc;
    const int64_t ld = ldc;
    fetch<kR, 64 * kV>(to, ld * static_cast<int64_t>(sizeof(float)));
    tile<kR, kV, /*kGroups=*/true>(block, row, [=](int r, int v, __m512 sum) {
      float* at = to + r * ld + 16 * v;
      _mm512_storeu_ps(at, _mm512_add_ps(sum, _mm512_loadu_ps(at)));
    });
  }
};

template <bool kBias, bool kResidual>
struct Rounder {
  static constexpr bool kGroups = false;
  RoundedOutput output;

  template <int kR, int kV>
  BANYAN_TILE void run(const MatmulBlock& block, int64_t row) const {
    const RoundedOutput o = output;
    BFloat16* to = o.out + row * o.ld;
    const BFloat16* residual = kResidual ? o.residual + row * o.ld : nullptr;
    fetch<kR, 32 * kV>(to, o.ld * static_cast<int64_t>(sizeof(BFloat16)));
    tile<kR, kV, /*kGroups=*/false>(block, row, [=](int r, int v, __m512 sum) {
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

// Rows are cut into tiles of nearly the same height, or by groups.
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
    const int64_t rows = Epilogue::kGroups ? std::min(kRows, block.rows - row)
                                           : (block.rows - row + left - 1) / left;
    kByRows[rows](epilogue, block, row);
    row += rows;
  }
}

constexpr int64_t kUnit = 16 * kRows;  // columns that are packed at once: three lines

// One pair of the depth of 96 columns to 16 groups; if not kFull, of the first `columns` of them.
template <bool kFull>
BANYAN_TILE void pack_unit(const BFloat16* even,
                           const BFloat16* odd,
                           bool has_odd,
                           int64_t columns,
                           BFloat16* to,
                           int64_t stride) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 64> order{};
    for (int i = 0; i < 64; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    return order;
  }();
  const __m512i low = _mm512_load_si512(kOrder.data());
  const __m512i high = _mm512_load_si512(kOrder.data() + 32);
  __m512i words[6];
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    const int64_t left = columns - 32 * i;
    const __mmask32 mask = kFull || left >= 32 ? 0xffffffffu : left <= 0 ? 0u : (1u << left) - 1u;
    const __m512i above = _mm512_maskz_loadu_epi16(mask, even + 32 * i);
    const __m512i below =
        has_odd ? _mm512_maskz_loadu_epi16(mask, odd + 32 * i) : _mm512_setzero_si512();
    words[2 * i] = _mm512_permutex2var_epi16(above, low, below);
    words[2 * i + 1] = _mm512_permutex2var_epi16(above, high, below);
  }
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0);
#pragma GCC unroll 16
  for (int group = 0; group < 16; ++group) {
    const int at = static_cast<int>(kRows) * group;
    if (!kFull && at >= columns) break;
    const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(at % 16));
    const __m512i six =
        _mm512_permutex2var_epi32(words[at / 16], index, words[at / 16 < 5 ? at / 16 + 1 : 5]);
    _mm256_mask_storeu_epi32(to + group * stride, 0x3f, _mm512_castsi512_si256(six));
  }
}

template <typename Epilogue>
void run(const MatmulBlock& block, const Epilogue& epilogue) {
  BANYAN_ASSERT(block.columns == 64 || block.columns == 32, "matmul_block: half panels");
  block.columns == 64 ? run_rows<Epilogue, 4>(block, epilogue)
                      : run_rows<Epilogue, 2>(block, epilogue);
}

}  // namespace

void pack_row_groups(const BFloat16* x,
                     int64_t ld,
                     int64_t depth,
                     int64_t rows,
                     int64_t padded_depth,
                     BFloat16* groups,
                     int64_t whole,
                     int64_t first) {
  const int64_t stride = group_stride(whole);
  const int64_t unit_stride = kUnit / kRows * stride;
  for (int64_t k = 0; k < depth; k += 2) {
    const BFloat16* even = x + k * ld;
    const BFloat16* odd = even + ld;
    const bool has_odd = k + 1 < depth;
    BFloat16* to = groups + kRows * (first + k);
    int64_t row = 0;
    for (; row + kUnit <= rows && has_odd; row += kUnit, to += unit_stride) {
      pack_unit<true>(even + row, odd + row, has_odd, kUnit, to, stride);
    }
    for (; row < rows; row += kUnit, to += unit_stride) {
      pack_unit<false>(even + row, odd + row, has_odd, rows - row, to, stride);
    }
  }
  const int64_t filled = (depth + 1) / 2 * 2;
  for (int64_t row = 0; row < rows && filled < padded_depth; row += kRows) {
    std::memset(static_cast<void*>(groups + row / kRows * stride + kRows * (first + filled)),
                0,
                sizeof(BFloat16) * kRows * (padded_depth - filled));
  }
}

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

void pack_row_groups(
    const c10::BFloat16*, int64_t, int64_t, int64_t, int64_t, c10::BFloat16*, int64_t, int64_t) {
  BANYAN_ASSERT(false, "pack_row_groups: the processor has no avx512_bf16");
}

void matmul_round(const MatmulBlock&, const RoundedOutput&) {
  BANYAN_ASSERT(false, "matmul_round: the processor has no avx512_bf16");
}

}  // namespace banyan::kernels

#endif
