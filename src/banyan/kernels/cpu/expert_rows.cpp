// Sums and scalings of experts' rows; formulas in the header.
#include "banyan/kernels/cpu/expert_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "banyan/kernels/cpu/lanes.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

constexpr int64_t kColumns = 512;  // sums of one token that are held at a time

int64_t grain_of(int64_t n) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(n, 1)); }

}  // namespace

BANYAN_MULTIVERSION
void combine_token(int64_t choices,
                   int64_t n,
                   const uint16_t* __restrict rows,
                   const int64_t* __restrict slot,
                   const float* __restrict weight,
                   const uint16_t* __restrict residual,
                   uint16_t* __restrict y) {
  alignas(64) float sum[kColumns];
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t count = n - first < kColumns ? n - first : kColumns;
    for (int64_t i = 0; i < count; ++i) sum[i] = 0.0f;
    for (int64_t c = 0; c < choices; ++c) {
      const float w = weight == nullptr ? 1.0f : weight[c];
      const uint16_t* from = rows + slot[c] * n + first;
      for (int64_t i = 0; i < count; ++i) sum[i] = fma(w, bf16_to_f32(from[i]), sum[i]);
    }
    uint16_t* to = y + first;
    if (residual == nullptr) {
      for (int64_t i = 0; i < count; ++i) to[i] = f32_to_bf16(sum[i]);
    } else {
      const uint16_t* past = residual + first;
      for (int64_t i = 0; i < count; ++i) {
        to[i] = f32_to_bf16(bf16_to_f32(f32_to_bf16(sum[i])) + bf16_to_f32(past[i]));
      }
    }
  }
}

BANYAN_MULTIVERSION
void scale_row(int64_t n, float weight, const uint16_t* __restrict x, uint16_t* __restrict scaled) {
  for (int64_t i = 0; i < n; ++i) scaled[i] = f32_to_bf16(weight * bf16_to_f32(x[i]));
}

BANYAN_MULTIVERSION
float dot_row(int64_t n, const uint16_t* __restrict x, const uint16_t* __restrict other) {
  Lanes lanes;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      lanes.at[i] = fma(bf16_to_f32(x[first + i]), bf16_to_f32(other[first + i]), lanes.at[i]);
    }
  }
  for (int64_t i = whole; i < n; ++i) {
    lanes.at[i - whole] = fma(bf16_to_f32(x[i]), bf16_to_f32(other[i]), lanes.at[i - whole]);
  }
  return lanes.sum();
}

void combine_rows(int64_t tokens,
                  int64_t choices,
                  int64_t n,
                  const uint16_t* rows,
                  const int64_t* slot,
                  const float* weight,
                  const uint16_t* residual,
                  uint16_t* y) {
  at::parallel_for(0, tokens, grain_of(n * choices), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      combine_token(choices,
                    n,
                    rows,
                    slot + t * choices,
                    weight == nullptr ? nullptr : weight + t * choices,
                    residual == nullptr ? nullptr : residual + t * n,
                    y + t * n);
    }
  });
}

void scale_and_dot_rows(int64_t rows,
                        int64_t n,
                        const float* weight,
                        const uint16_t* x,
                        const uint16_t* other,
                        uint16_t* scaled,
                        float* dot) {
  at::parallel_for(0, rows, grain_of(n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (dot != nullptr) dot[r] = dot_row(n, x + r * n, other + r * n);
      if (scaled != nullptr) scale_row(n, weight[r], x + r * n, scaled + r * n);
    }
  });
}

}  // namespace banyan::kernels
