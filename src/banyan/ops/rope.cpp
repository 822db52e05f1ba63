// Checks and dispatch of the rotary embedding, and its form in plain LibTorch operators.
#include "banyan/ops/rope.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/rope.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"
#include "banyan/ops/detail/token_rows.h"

namespace banyan::ops {
namespace {

using detail::bf16_bits;

void check(const at::Tensor& x,
           const at::Tensor& positions,
           const at::Tensor& cos,
           const at::Tensor& sin,
           const ComputeOptions& options) {
  BANYAN_CHECK(x.dim() == 3 && x.scalar_type() == options.dtype,
               "[rope] x: wanted [T, heads, head_dim] ",
               options.dtype,
               ", got ",
               x.sizes(),
               " ",
               x.scalar_type());
  BANYAN_CHECK(
      positions.dim() == 1 && positions.size(0) == x.size(0) && positions.scalar_type() == at::kInt,
      "[rope] positions: wanted [",
      x.size(0),
      "] int32, got ",
      positions.sizes(),
      " ",
      positions.scalar_type());
  BANYAN_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && 2 * cos.size(1) == x.size(2) &&
                   cos.scalar_type() == detail::accumulate_type(options.dtype) &&
                   sin.scalar_type() == cos.scalar_type(),
               "[rope] cos, sin: wanted [P, ",
               x.size(2) / 2,
               "] ",
               detail::accumulate_type(options.dtype),
               ", got ",
               cos.sizes(),
               " and ",
               sin.sizes());
  if (positions.numel() == 0) return;
  const auto [low, high] = positions.aminmax();
  BANYAN_CHECK(low.item<int32_t>() >= 0 && high.item<int32_t>() < cos.size(0),
               "[rope] position: wanted 0 .. ",
               cos.size(0) - 1,
               " (the length of the table), got ",
               low.item<int32_t>() < 0 ? low.item<int32_t>() : high.item<int32_t>());
}

// In `out`, if it is defined, else in a new tensor.
at::Tensor rotate(const at::Tensor& x,
                  const at::Tensor& positions,
                  const at::Tensor& cos,
                  const at::Tensor& sin,
                  bool transpose,
                  const ComputeOptions& options,
                  at::Tensor out = {}) {
  const profile::Scope timed(
      "rope", [&] { return profile::Work{.bytes = 2 * static_cast<int64_t>(x.nbytes())}; });
  check(x, positions, cos, sin, options);
  const int64_t half = x.size(2) / 2;
  if (is_native(options)) {
    const at::Tensor in = detail::token_rows(x);
    const at::Tensor ids = positions.contiguous();
    const at::Tensor c = cos.contiguous();
    const at::Tensor s = sin.contiguous();
    if (!out.defined()) out = at::empty(x.sizes(), x.options());
    BANYAN_ASSERT(detail::has_token_rows(out),
                  "[rope] out: the heads of a token are not side by side");
    kernels::rope(x.size(0),
                  x.size(1),
                  x.size(2),
                  transpose,
                  ids.data_ptr<int32_t>(),
                  c.data_ptr<float>(),
                  s.data_ptr<float>(),
                  bf16_bits(in),
                  in.stride(0),
                  bf16_bits(out),
                  out.stride(0));
    return out;
  }
  const at::Tensor wide = x.to(cos.scalar_type());
  const at::Tensor c = cos.index_select(0, positions).unsqueeze(1);
  at::Tensor s = sin.index_select(0, positions).unsqueeze(1);
  if (transpose) s = s.neg();
  const at::Tensor x1 = wide.slice(2, 0, half);
  const at::Tensor x2 = wide.slice(2, half);
  const at::Tensor y = at::cat({x1.mul(c).sub_(x2.mul(s)), x2.mul(c).add_(x1.mul(s))}, 2);
  return out.defined() ? out.copy_(y) : y.to(x.scalar_type());
}

void check_out(const at::Tensor& x, const at::Tensor& out) {
  BANYAN_CHECK(out.sizes() == x.sizes() && out.scalar_type() == x.scalar_type(),
               "[rope] out: wanted the shape and dtype of the input, ",
               x.sizes(),
               " ",
               x.scalar_type(),
               ", got ",
               out.sizes(),
               " ",
               out.scalar_type());
}

}  // namespace

namespace detail {

at::Tensor rope_forward(const at::Tensor& x,
                        const at::Tensor& positions,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        const ComputeOptions& options) {
  return rotate(x, positions, cos, sin, /*transpose=*/false, options);
}

at::Tensor rope_backward(const at::Tensor& dy,
                         const at::Tensor& positions,
                         const at::Tensor& cos,
                         const at::Tensor& sin,
                         const ComputeOptions& options) {
  return rotate(dy, positions, cos, sin, /*transpose=*/true, options);
}

void rope_forward_into(const at::Tensor& x,
                       const at::Tensor& positions,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       const ComputeOptions& options,
                       at::Tensor& out) {
  check_out(x, out);
  rotate(x, positions, cos, sin, /*transpose=*/false, options, out);
}

void rope_backward_into(const at::Tensor& dy,
                        const at::Tensor& positions,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        const ComputeOptions& options,
                        at::Tensor& out) {
  check_out(dy, out);
  rotate(dy, positions, cos, sin, /*transpose=*/true, options, out);
}

}  // namespace detail
}  // namespace banyan::ops
