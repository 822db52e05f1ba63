// Double loops over (head, query, key); no operator of LibTorch does arithmetic here.
#include "banyan/ops/attention_reference.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace banyan::ops {
namespace {

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(double* y, double a, const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// Probabilities of query i over keys 0..i; returns the log-sum-exp.
double softmax_row(const double* query,
                   const double* keys,
                   int64_t i,
                   int64_t stride,
                   int64_t dim,
                   double scale,
                   std::vector<double>& probs) {
  probs.assign(i + 1, 0.0);
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j <= i; ++j) {
    probs[j] = scale * dot(query, keys + j * stride, dim);
    largest = std::max(largest, probs[j]);
  }
  double sum = 0.0;
  for (double& p : probs) {
    p = std::exp(p - largest);
    sum += p;
  }
  for (double& p : probs) p /= sum;
  return largest + std::log(sum);
}

}  // namespace

AttentionReference attention_reference(const at::Tensor& q,
                                       const at::Tensor& k,
                                       const at::Tensor& v,
                                       double scale) {
  const int64_t n = q.size(0);
  const int64_t heads = q.size(1);
  const int64_t kv_heads = k.size(1);
  const int64_t dim = q.size(2);
  AttentionReference result{at::zeros_like(q), at::empty({n, heads}, q.options())};
  std::vector<double> probs;
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t kv = h / (heads / kv_heads);
    const double* keys = k.data_ptr<double>() + kv * dim;
    const double* values = v.data_ptr<double>() + kv * dim;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = i * heads + h;
      result.lse.data_ptr<double>()[row] =
          softmax_row(q.data_ptr<double>() + row * dim, keys, i, kv_heads * dim, dim, scale, probs);
      double* out = result.out.data_ptr<double>() + row * dim;
      for (int64_t j = 0; j <= i; ++j) add_scaled(out, probs[j], values + j * kv_heads * dim, dim);
    }
  }
  return result;
}

AttentionReferenceGradients attention_reference_backward(const at::Tensor& grad_out,
                                                         const at::Tensor& q,
                                                         const at::Tensor& k,
                                                         const at::Tensor& v,
                                                         double scale) {
  const int64_t n = q.size(0);
  const int64_t heads = q.size(1);
  const int64_t kv_heads = k.size(1);
  const int64_t dim = q.size(2);
  const int64_t stride = kv_heads * dim;
  AttentionReferenceGradients result{at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
  std::vector<double> probs;
  std::vector<double> grad_probs;
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t kv = h / (heads / kv_heads);
    const double* keys = k.data_ptr<double>() + kv * dim;
    const double* values = v.data_ptr<double>() + kv * dim;
    double* dk = result.dk.data_ptr<double>() + kv * dim;
    double* dv = result.dv.data_ptr<double>() + kv * dim;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = (i * heads + h) * dim;
      const double* query = q.data_ptr<double>() + row;
      const double* grad = grad_out.data_ptr<double>() + row;
      softmax_row(query, keys, i, stride, dim, scale, probs);
      grad_probs.assign(i + 1, 0.0);
      double mean = 0.0;
      for (int64_t j = 0; j <= i; ++j) {
        grad_probs[j] = dot(grad, values + j * stride, dim);
        mean += probs[j] * grad_probs[j];
      }
      for (int64_t j = 0; j <= i; ++j) {
        const double ds = scale * probs[j] * (grad_probs[j] - mean);
        add_scaled(dv + j * stride, probs[j], grad, dim);
        add_scaled(dk + j * stride, ds, query, dim);
        add_scaled(result.dq.data_ptr<double>() + row, ds, keys + j * stride, dim);
      }
    }
  }
  return result;
}

}  // namespace banyan::ops
