// Checks and dispatch of SwiGLU, and its form in plain LibTorch operators.
#include "banyan/ops/swiglu.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/swiglu.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"
#include "banyan/ops/one_owner.h"

namespace banyan::ops {
namespace {

using detail::bf16_bits;

void check(const at::Tensor& gate_up, const ComputeOptions& options) {
  BANYAN_CHECK(
      gate_up.dim() == 2 && gate_up.size(1) % 2 == 0 && gate_up.scalar_type() == options.dtype,
      "[swiglu] gate_up: wanted [T, 2 F] ",
      options.dtype,
      ", got ",
      gate_up.sizes(),
      " ",
      gate_up.scalar_type());
}

}  // namespace

namespace detail {

at::Tensor swiglu_forward(const at::Tensor& gate_up, const ComputeOptions& options) {
  // Reads 2 F columns, writes F.
  const profile::Scope timed("swiglu", [&] {
    return profile::Work{.bytes = static_cast<int64_t>(gate_up.nbytes()) * 3 / 2};
  });
  check(gate_up, options);
  const int64_t n = gate_up.size(1) / 2;
  if (is_native(options)) {
    const at::Tensor in = gate_up.contiguous();
    at::Tensor y = at::empty({gate_up.size(0), n}, gate_up.options());
    kernels::swiglu(gate_up.size(0), n, bf16_bits(in), bf16_bits(y));
    return y;
  }
  const at::Tensor wide = gate_up.to(detail::accumulate_type(gate_up.scalar_type()));
  const at::Tensor gate = wide.slice(1, 0, n);
  return gate.mul(at::sigmoid(gate)).mul_(wide.slice(1, n)).to(gate_up.scalar_type());
}

SwigluGradients swiglu_backward(at::Tensor dy, at::Tensor gate_up, const ComputeOptions& options) {
  // Reads 3 F columns, writes 3 F.
  const profile::Scope timed("swiglu backward", [&] {
    return profile::Work{.bytes = static_cast<int64_t>(gate_up.nbytes()) * 3};
  });
  check(gate_up, options);
  const int64_t n = gate_up.size(1) / 2;
  BANYAN_CHECK(dy.dim() == 2 && dy.size(0) == gate_up.size(0) && dy.size(1) == n &&
                   dy.scalar_type() == gate_up.scalar_type(),
               "[swiglu] dy: wanted [",
               gate_up.size(0),
               ", ",
               n,
               "] ",
               gate_up.scalar_type(),
               ", got ",
               dy.sizes(),
               " ",
               dy.scalar_type());
  if (is_native(options)) {
    const int64_t rows = gate_up.size(0);
    if (!gate_up.is_contiguous()) gate_up = gate_up.contiguous();
    if (!dy.is_contiguous()) dy = dy.contiguous();
    SwigluGradients out{has_one_owner(gate_up) ? gate_up : at::empty_like(gate_up),
                        has_one_owner(dy) ? dy : at::empty_like(dy)};
    kernels::swiglu_backward(
        rows, n, bf16_bits(dy), bf16_bits(gate_up), bf16_bits(out.gate_up), bf16_bits(out.y));
    return out;
  }
  const at::Tensor wide = gate_up.to(detail::accumulate_type(gate_up.scalar_type()));
  const at::Tensor grad = dy.to(wide.scalar_type());
  const at::Tensor gate = wide.slice(1, 0, n);
  const at::Tensor up = wide.slice(1, n);
  const at::Tensor s = at::sigmoid(gate);
  const at::Tensor grad_gate = grad.mul(up).mul_(s).mul_(gate.mul(s.neg().add_(1.0)).add_(1.0));
  const at::Tensor grad_up = grad.mul(gate).mul_(s);
  return {at::cat({grad_gate, grad_up}, 1).to(gate_up.scalar_type()),
          gate.mul(s).mul_(up).to(gate_up.scalar_type())};
}

}  // namespace detail
}  // namespace banyan::ops
