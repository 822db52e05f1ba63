// Checks and dispatch of RMSNorm, and its form in plain LibTorch operators: statistics in fp32
// (fp64 for fp64), xh cast to x's dtype before the weight, dx and grad_weight from unrounded
// products.
#include "banyan/ops/rms_norm.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/rms_norm.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"

namespace banyan::ops {
namespace {

using detail::bf16_bits;

void check(const at::Tensor& x, const at::Tensor& weight, const ComputeOptions& options) {
  BANYAN_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0),
               "[rms_norm] x: wanted [..., ",
               weight.sizes(),
               "], got ",
               x.sizes());
  BANYAN_CHECK(x.scalar_type() == options.dtype && weight.scalar_type() == options.dtype,
               "[rms_norm] dtype: wanted ",
               options.dtype,
               ", got x ",
               x.scalar_type(),
               ", weight ",
               weight.scalar_type());
}

// So many tensors of x's size are read or written.
profile::Work moved(const at::Tensor& x, int64_t count) {
  return {.bytes = count * static_cast<int64_t>(x.nbytes())};
}

at::Tensor inverse_rms(const at::Tensor& wide, double eps) {
  return at::rsqrt(wide.square().mean({-1}, /*keepdim=*/true).add_(eps));
}

}  // namespace

namespace detail {

at::Tensor rms_norm_forward(const at::Tensor& x,
                            const at::Tensor& weight,
                            double eps,
                            const ComputeOptions& options) {
  const profile::Scope timed("rms_norm", [&] { return moved(x, 2); });
  check(x, weight, options);
  if (is_native(options)) {
    const at::Tensor rows = x.contiguous();
    const at::Tensor w = weight.contiguous();
    at::Tensor y = at::empty_like(rows);
    const int64_t n = x.size(-1);
    if (x.numel() > 0) {
      kernels::rms_norm(
          x.numel() / n, n, static_cast<float>(eps), bf16_bits(rows), bf16_bits(w), bf16_bits(y));
    }
    return y;
  }
  const at::Tensor wide = x.to(detail::accumulate_type(x.scalar_type()));
  return wide.mul(inverse_rms(wide, eps)).to(x.scalar_type()).mul_(weight);
}

at::Tensor rms_norm_backward(const at::Tensor& dy,
                             const at::Tensor& x,
                             const at::Tensor& weight,
                             double eps,
                             at::Tensor& grad_weight,
                             const ComputeOptions& options,
                             const at::Tensor& residual) {
  const profile::Scope timed("rms_norm backward", [&] { return moved(x, 3); });
  check(x, weight, options);
  const at::ScalarType wide_type = detail::accumulate_type(x.scalar_type());
  BANYAN_CHECK(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type(),
               "[rms_norm] dy: wanted x's shape and dtype ",
               x.sizes(),
               ", got ",
               dy.sizes());
  BANYAN_CHECK(grad_weight.sizes() == weight.sizes() && grad_weight.scalar_type() == wide_type,
               "[rms_norm] grad_weight: wanted ",
               weight.sizes(),
               " ",
               wide_type,
               ", got ",
               grad_weight.sizes(),
               " ",
               grad_weight.scalar_type());
  BANYAN_CHECK(!residual.defined() ||
                   (residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type()),
               "[rms_norm] residual: wanted x's shape and dtype ",
               x.sizes());
  const int64_t n = x.size(-1);
  if (is_native(options)) {
    const at::Tensor rows = x.contiguous();
    const at::Tensor grads = dy.contiguous();
    const at::Tensor added = residual.defined() ? residual.contiguous() : at::Tensor();
    const at::Tensor w = weight.contiguous();
    at::Tensor dx = at::empty_like(rows);
    BANYAN_ASSERT(grad_weight.is_contiguous(), "[rms_norm] grad_weight is not contiguous");
    if (x.numel() > 0) {
      kernels::rms_norm_backward(x.numel() / n,
                                 n,
                                 static_cast<float>(eps),
                                 bf16_bits(grads),
                                 bf16_bits(rows),
                                 bf16_bits(w),
                                 added.defined() ? bf16_bits(added) : nullptr,
                                 bf16_bits(dx),
                                 grad_weight.data_ptr<float>());
    }
    return dx;
  }
  const at::Tensor wide = x.to(wide_type);
  const at::Tensor grad = dy.to(wide_type);
  const at::Tensor inverse = inverse_rms(wide, eps);
  const at::Tensor normed = wide.mul(inverse);
  grad_weight.add_(normed.to(x.scalar_type()).to(wide_type).mul(grad).reshape({-1, n}).sum({0}));
  const at::Tensor weighted = grad.mul(weight.to(wide_type));
  const at::Tensor mean = weighted.mul(normed).mean({-1}, /*keepdim=*/true);
  at::Tensor dx = weighted.sub(normed.mul(mean)).mul_(inverse);
  if (residual.defined()) dx.add_(residual);
  return dx.to(x.scalar_type());
}

}  // namespace detail
}  // namespace banyan::ops
