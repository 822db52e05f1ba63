// Checks and dispatch of y = x Wᵀ + b: the packed kernels for a packed weight, LibTorch operators
// for a plain one.
#include "banyan/ops/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/huge_pages.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"

namespace banyan::ops {

using c10::BFloat16;
using kernels::Panels;

namespace {

// Row-major with unit stride in a row; other layouts are copied.
at::Tensor rows_of(const at::Tensor& x) {
  return x.stride(1) == 1 || x.numel() == 0 ? x : x.contiguous();
}

// A product of `rows` rows with a weight: its three matrices once each, in bf16.
profile::Work product_work(int64_t rows, const LinearWeight& weight) {
  const int64_t numbers = rows * (weight.in + weight.out) + weight.in * weight.out;
  return {.flops = 2 * rows * weight.in * weight.out,
          .bytes = 2 * numbers,
          .rows = weight.out,
          .columns = weight.in};
}

void check_matrix(const char* what, const at::Tensor& x, int64_t columns) {
  BANYAN_CHECK(x.dim() == 2 && x.size(1) == columns,
               "[linear] ",
               what,
               ": wanted shape [T, ",
               columns,
               "], got ",
               x.sizes());
}

// Shape, and bf16 on the CPU: what the packed kernels read.
void check_packed_input(const char* what, const at::Tensor& x, int64_t columns) {
  check_matrix(what, x, columns);
  BANYAN_CHECK(x.scalar_type() == at::kBFloat16 && x.device().is_cpu(),
               "[linear] ",
               what,
               ": wanted bf16 on the CPU for a packed weight, got ",
               x.scalar_type(),
               " on ",
               x.device());
}

void check_gradient(const at::Tensor& grad, at::IntArrayRef shape, at::ScalarType dtype) {
  BANYAN_CHECK(grad.defined() && grad.sizes() == shape && grad.scalar_type() == dtype &&
                   grad.stride(-1) == 1,
               "[linear] gradient: wanted a ",
               dtype,
               " buffer of shape ",
               shape);
}

void refresh(at::Tensor& packed, int64_t depth, int64_t columns) {
  if (packed.defined()) return;
  packed = at::empty({kernels::divide_up(columns, kernels::kPanel),
                      kernels::divide_up(depth, 2),
                      kernels::kPanel,
                      2},
                     at::kBFloat16);
  kernels::advise_huge_pages(packed.data_ptr(), packed.nbytes());
}

}  // namespace

void pack_weight(const at::Tensor& master,
                 const ComputeOptions& options,
                 bool with_backward,
                 LinearWeight& weight) {
  BANYAN_CHECK(master.dim() == 2 && master.is_contiguous(),
               "[linear] master: wanted a contiguous matrix [out, in], got shape ",
               master.sizes());
  weight.out = master.size(0);
  weight.in = master.size(1);
  if (!is_native(options)) {
    if (master.scalar_type() == options.dtype && master.device() == options.device) {
      weight.plain = master;
    } else {
      if (!weight.plain.defined()) {
        weight.plain =
            at::empty(master.sizes(), master.options().dtype(options.dtype).device(options.device));
      }
      weight.plain.copy_(master);
    }
    return;
  }
  BANYAN_CHECK(master.scalar_type() == at::kFloat && master.device().is_cpu(),
               "[linear] master: wanted fp32 on the CPU, got ",
               master.scalar_type(),
               " on ",
               master.device());
  const float* values = master.const_data_ptr<float>();
  refresh(weight.packed, weight.in, weight.out);
  kernels::pack_weight(values, weight.out, weight.in, weight.packed.data_ptr<BFloat16>());
  if (with_backward) {
    refresh(weight.packed_t, weight.out, weight.in);
    kernels::pack_weight_transposed(
        values, weight.out, weight.in, weight.packed_t.data_ptr<BFloat16>());
  } else {
    weight.packed_t = at::Tensor();
  }
}

namespace detail {

at::Tensor linear_forward(const at::Tensor& x,
                          const LinearWeight& weight,
                          const at::Tensor& bias,
                          const at::Tensor& residual) {
  const profile::Scope timed("linear", [&] { return product_work(x.size(0), weight); });
  if (!weight.is_packed()) {
    check_matrix("x", x, weight.in);
    at::Tensor y = bias.defined() ? at::linear(x, weight.plain, bias) : at::linear(x, weight.plain);
    return residual.defined() ? y.add_(residual) : y;
  }
  check_packed_input("x", x, weight.in);
  BANYAN_CHECK(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.out &&
                                   bias.is_contiguous() && bias.scalar_type() == at::kBFloat16),
               "[linear] bias: wanted bf16 [",
               weight.out,
               "]");
  BANYAN_CHECK(!residual.defined() ||
                   (residual.dim() == 2 && residual.size(0) == x.size(0) &&
                    residual.size(1) == weight.out && residual.scalar_type() == at::kBFloat16),
               "[linear] residual: wanted bf16 [",
               x.size(0),
               ", ",
               weight.out,
               "]");
  const at::Tensor rows = rows_of(x);
  const at::Tensor added = residual.defined() ? residual.contiguous() : at::Tensor();
  at::Tensor y = at::empty({x.size(0), weight.out}, x.options());
  kernels::gemm(rows.const_data_ptr<BFloat16>(),
                rows.stride(0),
                rows.size(0),
                Panels{weight.packed.const_data_ptr<BFloat16>(), weight.in, weight.out},
                bias.defined() ? bias.const_data_ptr<BFloat16>() : nullptr,
                y.data_ptr<BFloat16>(),
                weight.out,
                added.defined() ? added.const_data_ptr<BFloat16>() : nullptr);
  return y;
}

at::Tensor linear_backward_input(const at::Tensor& dy, const LinearWeight& weight) {
  const profile::Scope timed("linear dx", [&] { return product_work(dy.size(0), weight); });
  if (!weight.is_packed()) {
    check_matrix("dy", dy, weight.out);
    return at::mm(dy, weight.plain);
  }
  check_packed_input("dy", dy, weight.out);
  BANYAN_ASSERT(weight.packed_t.defined(), "the weight was packed for inference only");
  const at::Tensor rows = rows_of(dy);
  at::Tensor dx = at::empty({dy.size(0), weight.in}, dy.options());
  kernels::gemm(rows.const_data_ptr<BFloat16>(),
                rows.stride(0),
                rows.size(0),
                Panels{weight.packed_t.const_data_ptr<BFloat16>(), weight.out, weight.in},
                /*bias=*/nullptr,
                dx.data_ptr<BFloat16>(),
                weight.in);
  return dx;
}

void linear_backward_weight(const at::Tensor& dy,
                            const at::Tensor& x,
                            at::Tensor& grad_weight,
                            const at::Tensor& grad_bias,
                            const ComputeOptions& options) {
  BANYAN_CHECK(dy.dim() == 2 && x.dim() == 2 && dy.size(0) == x.size(0),
               "[linear] dy, x: wanted as many rows in both, got ",
               dy.sizes(),
               " and ",
               x.sizes());
  const profile::Scope timed("linear dW", [&] {
    const int64_t out = dy.size(1);
    const int64_t in = x.size(1);
    // dW is read and written, in fp32.
    return profile::Work{.flops = 2 * x.size(0) * in * out,
                         .bytes = 2 * x.size(0) * (in + out) + 8 * in * out,
                         .rows = out,
                         .columns = in};
  });
  const at::ScalarType dtype = detail::accumulate_type(x.scalar_type());
  check_gradient(grad_weight, {dy.size(1), x.size(1)}, dtype);
  if (grad_bias.defined()) check_gradient(grad_bias, {dy.size(1)}, dtype);
  if (!is_native(options)) {
    const at::Tensor wide = dy.to(dtype);
    grad_weight.addmm_(wide.t(), x.to(dtype));
    if (grad_bias.defined()) grad_bias.add_(wide.sum(0));
    return;
  }
  check_packed_input("dy", dy, dy.size(1));
  check_packed_input("x", x, x.size(1));
  const at::Tensor dy_rows = rows_of(dy);
  const at::Tensor x_rows = rows_of(x);
  kernels::weight_gradient(dy_rows.const_data_ptr<BFloat16>(),
                           dy_rows.stride(0),
                           x_rows.const_data_ptr<BFloat16>(),
                           x_rows.stride(0),
                           dy.size(0),
                           dy.size(1),
                           x.size(1),
                           grad_weight.data_ptr<float>(),
                           grad_weight.stride(0));
  if (grad_bias.defined()) {
    kernels::add_column_sums(dy_rows.const_data_ptr<BFloat16>(),
                             dy_rows.stride(0),
                             dy.size(0),
                             dy.size(1),
                             grad_bias.data_ptr<float>());
  }
}

}  // namespace detail
}  // namespace banyan::ops
