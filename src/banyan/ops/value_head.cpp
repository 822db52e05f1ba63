// Checks, loops on the CPU, and plain LibTorch operators elsewhere.
#include "banyan/ops/value_head.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/outer.h>

#include <vector>

#include "banyan/core/error.h"
#include "banyan/ops/detail/originals.h"

namespace banyan::ops {
namespace {

constexpr int64_t kLanes = 8;         // partial sums of a row
constexpr int64_t kRowsPerTask = 16;  // of the forward

void check(const at::Tensor& hidden, const ValueHeadWeight& head) {
  BANYAN_CHECK(hidden.dim() == 2 && head.weight.dim() == 2 && head.weight.size(0) == 1 &&
                   hidden.size(1) == head.weight.size(1),
               "[value_head] hidden and weight: wanted [R, E] and [1, E], got ",
               hidden.sizes(),
               " and ",
               head.weight.sizes());
}

// sum_e h[e] w[e]: lane j takes e = j, j + 8, ...; then the lanes in order.
template <typename T>
double dot(const T* h, const T* w, int64_t size) {
  double lanes[kLanes] = {};
  int64_t e = 0;
  for (; e + kLanes <= size; e += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += double{h[e + j]} * double{w[e + j]};
  }
  for (int64_t j = 0; e < size; ++e, ++j) lanes[j] += double{h[e]} * double{w[e]};
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename T>
void forward_loop(
    int64_t rows, int64_t size, const T* hidden, const T* weight, double bias, T* value) {
  at::parallel_for(0, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      value[r] = static_cast<T>(dot(hidden + r * size, weight, size) + bias);
    }
  });
}

// grad_weight[e] += sum_r g[r] h[r][e], one writer per e.
template <typename T>
void weight_loop(int64_t rows, int64_t size, const T* hidden, const T* grad, T* grad_weight) {
  at::parallel_for(0, size, /*grain_size=*/64, [&](int64_t begin, int64_t end) {
    std::vector<double> sums(end - begin, 0.0);
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = hidden + r * size;
      for (int64_t e = begin; e < end; ++e) sums[e - begin] += double{grad[r]} * double{row[e]};
    }
    for (int64_t e = begin; e < end; ++e) {
      grad_weight[e] = static_cast<T>(double{grad_weight[e]} + sums[e - begin]);
    }
  });
}

template <typename T>
void bias_loop(int64_t rows, const T* grad, T* grad_bias) {
  double sum = 0.0;
  for (int64_t r = 0; r < rows; ++r) sum += double{grad[r]};
  *grad_bias = static_cast<T>(double{*grad_bias} + sum);
}

template <typename T>
void backward_loops(const at::Tensor& wide,
                    const at::Tensor& grad,
                    at::Tensor& grad_weight,
                    const at::Tensor& grad_bias) {
  weight_loop(wide.size(0),
              wide.size(1),
              wide.const_data_ptr<T>(),
              grad.const_data_ptr<T>(),
              grad_weight.mutable_data_ptr<T>());
  if (grad_bias.defined()) {
    bias_loop(wide.size(0), grad.const_data_ptr<T>(), grad_bias.mutable_data_ptr<T>());
  }
}

}  // namespace

namespace detail {

at::Tensor value_head_forward(const at::Tensor& hidden, const ValueHeadWeight& head) {
  check(hidden, head);
  const at::Tensor wide = hidden.to(head.weight.scalar_type()).contiguous();
  if (!hidden.is_cpu()) {
    const at::Tensor value = at::mv(wide, head.weight.view({-1}));
    return head.bias.defined() ? value.add(head.bias) : value;
  }
  const double bias = head.bias.defined() ? head.bias.item<double>() : 0.0;
  at::Tensor value = at::empty({hidden.size(0)}, wide.options());
  if (wide.scalar_type() == at::kDouble) {
    forward_loop(hidden.size(0),
                 hidden.size(1),
                 wide.const_data_ptr<double>(),
                 head.weight.const_data_ptr<double>(),
                 bias,
                 value.mutable_data_ptr<double>());
  } else {
    forward_loop(hidden.size(0),
                 hidden.size(1),
                 wide.const_data_ptr<float>(),
                 head.weight.const_data_ptr<float>(),
                 bias,
                 value.mutable_data_ptr<float>());
  }
  return value;
}

at::Tensor value_head_backward(const at::Tensor& hidden,
                               const ValueHeadWeight& head,
                               const at::Tensor& grad_value,
                               at::Tensor& grad_weight,
                               const at::Tensor& grad_bias) {
  check(hidden, head);
  BANYAN_CHECK(grad_value.dim() == 1 && grad_value.size(0) == hidden.size(0),
               "[value_head] gradient: wanted [",
               hidden.size(0),
               "], got ",
               grad_value.sizes());
  BANYAN_ASSERT(grad_weight.defined() && grad_bias.defined() == head.bias.defined(),
                "value_head: gradients are not allocated: ParamTable::ensure_grads first");
  const at::Tensor wide = hidden.to(head.weight.scalar_type()).contiguous();
  const at::Tensor grad = grad_value.to(wide.options()).contiguous();
  if (!hidden.is_cpu()) {
    grad_weight.view({-1}).add_(at::mv(wide.t(), grad));
    if (grad_bias.defined()) grad_bias.add_(grad.sum());
  } else if (wide.scalar_type() == at::kDouble) {
    backward_loops<double>(wide, grad, grad_weight, grad_bias);
  } else {
    backward_loops<float>(wide, grad, grad_weight, grad_bias);
  }
  return at::outer(grad, head.weight.view({-1})).to(hidden.scalar_type());
}

}  // namespace detail
}  // namespace banyan::ops
