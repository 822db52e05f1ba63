// The router in LibTorch operators, except for its logits, which the native kernels multiply.
#include "banyan/ops/router.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"

namespace banyan::ops {
namespace {

using c10::BFloat16;

// One row times one expert in fp64, in one order: eight partial sums, then their sum.
template <typename T, typename W>
double dot(const T* x, const W* w, int64_t n) {
  constexpr int64_t kParts = 8;
  double parts[kParts] = {};
  for (int64_t i = 0; i < n; ++i) {
    parts[i % kParts] += static_cast<double>(x[i]) * static_cast<double>(w[i]);
  }
  double sum = 0.0;
  for (const double part : parts) sum += part;
  return sum;
}

// fp64 logits of bf16 rows whose bits do not depend on the other rows.
at::Tensor double_logits(const at::Tensor& h, const LinearWeight& weight) {
  const at::Tensor rows = h.contiguous();
  const kernels::Panels panels{weight.packed.const_data_ptr<BFloat16>(), weight.in, weight.out};
  at::Tensor unpacked = at::empty({weight.out, weight.in}, h.options());
  for (int64_t e = 0; e < weight.out; ++e) {
    kernels::unpack_row(panels, e, unpacked.data_ptr<BFloat16>() + e * weight.in);
  }
  at::Tensor logits = at::empty({rows.size(0), weight.out}, h.options().dtype(at::kDouble));
  const auto* x = rows.const_data_ptr<BFloat16>();
  const auto* w = unpacked.const_data_ptr<BFloat16>();
  double* out = logits.data_ptr<double>();
  at::parallel_for(0, rows.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t e = 0; e < weight.out; ++e) {
        out[t * weight.out + e] = dot(x + t * weight.in, w + e * weight.in, weight.in);
      }
    }
  });
  return logits;
}

at::Tensor router_logits(const at::Tensor& h,
                         const LinearWeight& weight,
                         bool in_double,
                         const ComputeOptions& options) {
  if (is_native(options)) {
    if (in_double) return double_logits(h, weight);
    const at::Tensor rows = h.contiguous();
    at::Tensor logits = at::empty({rows.size(0), weight.out}, rows.options().dtype(at::kFloat));
    kernels::gemm(rows.const_data_ptr<BFloat16>(),
                  rows.stride(0),
                  rows.size(0),
                  kernels::Panels{weight.packed.const_data_ptr<BFloat16>(), weight.in, weight.out},
                  logits.data_ptr<float>(),
                  weight.out);
    return logits;
  }
  const at::ScalarType dtype = in_double ? at::kDouble : detail::accumulate_type(h.scalar_type());
  return at::linear(h.to(dtype), weight.plain.to(dtype));
}

}  // namespace

namespace detail {

Routing route(const at::Tensor& h,
              const LinearWeight& weight,
              const RouterOptions& router,
              const ComputeOptions& options) {
  const profile::Scope timed("router", [&] {
    return profile::Work{.flops = 2 * h.size(0) * weight.in * weight.out,
                         .bytes = static_cast<int64_t>(h.nbytes()) + 4 * h.size(0) * weight.out,
                         .rows = weight.out,
                         .columns = weight.in};
  });
  BANYAN_CHECK(h.dim() == 2 && h.size(1) == weight.in,
               "[router] h: wanted [T, ",
               weight.in,
               "], got ",
               h.sizes());
  BANYAN_CHECK(router.num_chosen >= 1 && router.num_chosen <= weight.out,
               "[router] experts per token: wanted 1 to ",
               weight.out,
               ", got ",
               router.num_chosen);
  Routing routing;
  routing.logits = router_logits(h, weight, router.in_double, options);
  routing.choice = std::get<1>(at::topk(at::softmax(routing.logits, -1), router.num_chosen, -1));
  return routing;
}

}  // namespace detail

at::Tensor routing_weights(const Routing& routing, const RouterOptions& router) {
  const at::Tensor chosen = at::softmax(routing.logits, -1).gather(1, routing.choice);
  return router.renormalise ? chosen.div(chosen.sum({1}, /*keepdim=*/true)) : chosen;
}

at::Tensor routing_backward(const Routing& routing,
                            const at::Tensor& grad_weight,
                            const RouterOptions& router,
                            const RouterPenalty* penalty) {
  const profile::Scope timed("router backward");
  const at::Tensor probability = at::softmax(routing.logits, -1);
  at::Tensor grad_chosen = grad_weight.to(probability.scalar_type());
  if (router.renormalise) {
    const at::Tensor chosen = probability.gather(1, routing.choice);
    const at::Tensor sum = chosen.sum({1}, /*keepdim=*/true);
    const at::Tensor mean = grad_chosen.mul(chosen).sum({1}, /*keepdim=*/true).div(sum);
    grad_chosen = grad_chosen.sub(mean).div(sum);
  }
  at::Tensor grad = at::zeros_like(probability);
  grad.scatter_(1, routing.choice, grad_chosen);
  const bool has_penalty = penalty != nullptr;
  const auto like = probability.options();
  if (has_penalty && penalty->slope.defined()) {
    grad.add_(penalty->multiplicity.to(like).unsqueeze(1).mul(penalty->slope.to(like)));
  }
  const at::Tensor inner = probability.mul(grad).sum({1}, /*keepdim=*/true);
  grad.sub_(inner).mul_(probability);
  if (has_penalty && penalty->z_slope != 0.0) {
    const at::Tensor lse = at::logsumexp(routing.logits, {1}, /*keepdim=*/true);
    grad.addcmul_(
        probability, lse.mul(penalty->multiplicity.to(like).unsqueeze(1)), penalty->z_slope);
  }
  return grad;
}

}  // namespace banyan::ops
