// RMSNorm on bf16 rows; formulas in the header.
#include "banyan/kernels/cpu/rms_norm.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "banyan/kernels/cpu/lanes.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

constexpr int64_t kBlockRows = 64;

BANYAN_INLINE float inverse_rms(const uint16_t* __restrict x, int64_t n, float eps) {
  Lanes lanes;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const float value = bf16_to_f32(x[first + i]);
      lanes.at[i] = fma(value, value, lanes.at[i]);
    }
  }
  for (int64_t i = whole; i < n; ++i) {
    const float value = bf16_to_f32(x[i]);
    lanes.at[i - whole] = fma(value, value, lanes.at[i - whole]);
  }
  return 1.0f / __builtin_sqrtf(lanes.sum() / static_cast<float>(n) + eps);
}

// Whether there is a past is no choice in the loop: the compiler would load it under a mask, slowly
// where it is null, or leave the loop without vectors.
template <bool kAddPast>
BANYAN_INLINE void finish_row(int64_t n,
                              float r,
                              float mean,
                              const uint16_t* __restrict grad,
                              const uint16_t* __restrict in,
                              const uint16_t* __restrict weight,
                              const uint16_t* __restrict past,
                              uint16_t* __restrict out,
                              float* __restrict partial) {
  for (int64_t i = 0; i < n; ++i) {
    const float d = bf16_to_f32(grad[i]);
    const float normed = bf16_to_f32(in[i]) * r;
    const float g = fma(-normed, mean, d * bf16_to_f32(weight[i]));
    out[i] = f32_to_bf16(kAddPast ? fma(r, g, bf16_to_f32(past[i])) : r * g);
    partial[i] = fma(d, bf16_to_f32(f32_to_bf16(normed)), partial[i]);
  }
}

}  // namespace

BANYAN_MULTIVERSION
void rms_norm_rows(int64_t rows,
                   int64_t n,
                   float eps,
                   const uint16_t* __restrict x,
                   const uint16_t* __restrict weight,
                   uint16_t* __restrict y) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* in = x + row * n;
    uint16_t* out = y + row * n;
    const float r = inverse_rms(in, n, eps);
    for (int64_t i = 0; i < n; ++i) {
      const float normed = bf16_to_f32(f32_to_bf16(bf16_to_f32(in[i]) * r));
      out[i] = f32_to_bf16(bf16_to_f32(weight[i]) * normed);
    }
  }
}

// dx of some rows; partial [n] is set to their share of dw. The residual may be null.
BANYAN_MULTIVERSION
void rms_norm_backward_rows(int64_t rows,
                            int64_t n,
                            float eps,
                            const uint16_t* __restrict dy,
                            const uint16_t* __restrict x,
                            const uint16_t* __restrict weight,
                            const uint16_t* __restrict residual,
                            uint16_t* __restrict dx,
                            float* __restrict partial) {
  for (int64_t i = 0; i < n; ++i) partial[i] = 0.0f;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* in = x + row * n;
    const uint16_t* grad = dy + row * n;
    uint16_t* out = dx + row * n;
    const float r = inverse_rms(in, n, eps);
    Lanes lanes;
    for (int64_t first = 0; first < whole; first += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        const float g = bf16_to_f32(grad[first + i]) * bf16_to_f32(weight[first + i]);
        lanes.at[i] = fma(g, bf16_to_f32(in[first + i]) * r, lanes.at[i]);
      }
    }
    for (int64_t i = whole; i < n; ++i) {
      const float g = bf16_to_f32(grad[i]) * bf16_to_f32(weight[i]);
      lanes.at[i - whole] = fma(g, bf16_to_f32(in[i]) * r, lanes.at[i - whole]);
    }
    const float mean = lanes.sum() / static_cast<float>(n);
    if (residual == nullptr) {
      finish_row<false>(n, r, mean, grad, in, weight, nullptr, out, partial);
    } else {
      finish_row<true>(n, r, mean, grad, in, weight, residual + row * n, out, partial);
    }
  }
}

void rms_norm(
    int64_t rows, int64_t n, float eps, const uint16_t* x, const uint16_t* weight, uint16_t* y) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(n, 1));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    rms_norm_rows(end - begin, n, eps, x + begin * n, weight, y + begin * n);
  });
}

void rms_norm_backward(int64_t rows,
                       int64_t n,
                       float eps,
                       const uint16_t* dy,
                       const uint16_t* x,
                       const uint16_t* weight,
                       const uint16_t* residual,
                       uint16_t* dx,
                       float* grad_weight) {
  static thread_local Scratch memory;
  const int64_t num_blocks = (rows + kBlockRows - 1) / kBlockRows;
  float* partial = memory.get<float>(num_blocks * n);
  at::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockRows;
      rms_norm_backward_rows(std::min(kBlockRows, rows - first),
                             n,
                             eps,
                             dy + first * n,
                             x + first * n,
                             weight,
                             residual == nullptr ? nullptr : residual + first * n,
                             dx + first * n,
                             partial + block * n);
    }
  });
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t i = 0; i < n; ++i) grad_weight[i] += partial[block * n + i];
  }
}

}  // namespace banyan::kernels
