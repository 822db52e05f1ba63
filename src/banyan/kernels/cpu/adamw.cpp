// AdamW and sums of squares; formulas in the header.
#include "banyan/kernels/cpu/adamw.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

constexpr int64_t kChunk = 1 << 15;  // elements; a multiple of every vector width
constexpr int64_t kSumLanes = 16;

template <typename Work>
void for_each_chunk(int64_t n, const Work& work) {
  const int64_t num_chunks = (n + kChunk - 1) / kChunk;
  at::parallel_for(0, num_chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      work(chunk, chunk * kChunk, std::min(kChunk, n - chunk * kChunk));
    }
  });
}

template <typename Scalar>
BANYAN_INLINE double sum_lanes(int64_t n, const Scalar* __restrict x) {
  double lanes[kSumLanes] = {};
  const int64_t whole = n / kSumLanes * kSumLanes;
  for (int64_t first = 0; first < whole; first += kSumLanes) {
    for (int64_t i = 0; i < kSumLanes; ++i) {
      const double value = x[first + i];
      lanes[i] += value * value;
    }
  }
  double sum = 0.0;
  for (int64_t i = whole; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (int64_t i = 0; i < kSumLanes; ++i) sum += lanes[i];
  return sum;
}

}  // namespace

BANYAN_MULTIVERSION
void adamw_chunk(const AdamWStep& step,
                 int64_t n,
                 const float* __restrict grad,
                 float* __restrict w,
                 float* __restrict m,
                 float* __restrict v) {
  const AdamWStep s = step;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * s.grad_scale;
    const float first = fma(g - m[i], s.one_minus_beta1, m[i]);
    const float second = fma(g * s.one_minus_beta2, g, v[i] * s.beta2);
    const float divisor = fma(__builtin_sqrtf(second), s.inverse_correction2, s.eps);
    m[i] = first;
    v[i] = second;
    w[i] = fma(-s.step_size, first / divisor, w[i] * s.decay);
  }
}

BANYAN_MULTIVERSION
double sum_of_squares_fp32(int64_t n, const float* x) { return sum_lanes(n, x); }

BANYAN_MULTIVERSION
double sum_of_squares_fp64(int64_t n, const double* x) { return sum_lanes(n, x); }

void adamw(const AdamWStep& step, int64_t n, const float* grad, float* w, float* m, float* v) {
  for_each_chunk(n, [&](int64_t, int64_t first, int64_t count) {
    adamw_chunk(step, count, grad + first, w + first, m + first, v + first);
  });
}

namespace {

template <typename Scalar, typename Sum>
double sum_chunks(int64_t n, const Scalar* x, const Sum& sum) {
  std::vector<double> partial((n + kChunk - 1) / kChunk);
  for_each_chunk(n, [&](int64_t chunk, int64_t first, int64_t count) {
    partial[chunk] = sum(count, x + first);
  });
  double total = 0.0;
  for (const double value : partial) total += value;
  return total;
}

}  // namespace

double sum_of_squares(int64_t n, const float* x) { return sum_chunks(n, x, sum_of_squares_fp32); }

double sum_of_squares(int64_t n, const double* x) { return sum_chunks(n, x, sum_of_squares_fp64); }

}  // namespace banyan::kernels
