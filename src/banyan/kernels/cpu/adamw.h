// The optimizer's two passes over memory, on contiguous fp32 arrays: the sum of squares of a
// gradient and the AdamW update in one sweep. Work is split into chunks of a fixed size and partial
// sums are added in chunk order, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// Factors of one AdamW step, prepared in double.
struct AdamWStep {
  float grad_scale = 1.0f;
  float decay = 1.0f;  // 1 - lr * weight_decay
  float one_minus_beta1 = 0.0f;
  float beta2 = 0.0f;
  float one_minus_beta2 = 0.0f;
  float step_size = 0.0f;            // lr / (1 - beta1^t)
  float inverse_correction2 = 1.0f;  // 1 / sqrt(1 - beta2^t)
  float eps = 0.0f;
};

// g = grad_scale grad;  m += (1 - b1) (g - m);  v = b2 v + (1 - b2) g^2;
// w = decay w - step_size m / (inverse_correction2 sqrt(v) + eps). Parallel.
void adamw(const AdamWStep& step, int64_t n, const float* grad, float* w, float* m, float* v);

// Sum of x^2 in fp64. Parallel.
double sum_of_squares(int64_t n, const float* x);
double sum_of_squares(int64_t n, const double* x);

}  // namespace banyan::kernels
