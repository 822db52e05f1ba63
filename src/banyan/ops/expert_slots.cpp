// The ops of experts as everyone calls them: the slot's chain, or the original.
#include "banyan/ops/expert_slots.h"

#include <ATen/ops/empty.h>

#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"
#include "banyan/ops/slots.h"

namespace banyan::ops {

using feature::OpSlot;

OpSlot<RouterOp>& router_slot() {
  static auto* const slot = new OpSlot<RouterOp>("router", {&detail::route});
  return *slot;
}

OpSlot<GroupedGemmOp>& grouped_gemm_slot() {
  static auto* const slot = new OpSlot<GroupedGemmOp>("grouped_gemm",
                                                      {&detail::grouped_linear_forward,
                                                       &detail::grouped_linear_backward_input,
                                                       &detail::grouped_linear_backward_weight});
  return *slot;
}

OpSlot<PermuteOp>& permute_slot() {
  static auto* const slot = new OpSlot<PermuteOp>("permute", {&detail::permute});
  return *slot;
}

OpSlot<UnpermuteOp>& unpermute_slot() {
  static auto* const slot = new OpSlot<UnpermuteOp>("unpermute", {&detail::unpermute});
  return *slot;
}

Routing route(const at::Tensor& h,
              const LinearWeight& weight,
              const RouterOptions& router,
              const ComputeOptions& options) {
  const auto op = router_slot().changed();
  if (!op) [[likely]]
    return detail::route(h, weight, router, options);
  Routing out = op->forward(h, weight, router, options);
  const at::ScalarType wide =
      router.in_double ? at::kDouble : detail::accumulate_type(h.scalar_type());
  const at::Tensor logits = at::empty({0}, h.options().dtype(wide));
  const at::Tensor choice = at::empty({0}, h.options().dtype(at::kLong));
  const int64_t rows = h.size(0);
  return {slot_result(router_slot(), "logits", out.logits, {rows, weight.out}, logits),
          slot_result(router_slot(), "choice", out.choice, {rows, router.num_chosen}, choice)};
}

at::Tensor grouped_linear_forward(const at::Tensor& x,
                                  const std::vector<int64_t>& offsets,
                                  const ExpertWeights& weights) {
  const auto op = grouped_gemm_slot().changed();
  if (!op) [[likely]]
    return detail::grouped_linear_forward(x, offsets, weights);
  return slot_result(grouped_gemm_slot(),
                     "y",
                     op->forward(x, offsets, weights),
                     {x.size(0), weights.front()->out},
                     x);
}

at::Tensor grouped_linear_backward_input(const at::Tensor& dy,
                                         const std::vector<int64_t>& offsets,
                                         const ExpertWeights& weights) {
  const auto op = grouped_gemm_slot().changed();
  if (!op) [[likely]]
    return detail::grouped_linear_backward_input(dy, offsets, weights);
  return slot_result(grouped_gemm_slot(),
                     "dx",
                     op->backward_input(dy, offsets, weights),
                     {dy.size(0), weights.front()->in},
                     dy);
}

void grouped_linear_backward_weight(const at::Tensor& dy,
                                    const at::Tensor& x,
                                    const std::vector<int64_t>& offsets,
                                    const std::vector<at::Tensor*>& grads,
                                    const ComputeOptions& options) {
  const auto op = grouped_gemm_slot().changed();
  if (!op) [[likely]] {
    return detail::grouped_linear_backward_weight(dy, x, offsets, grads, options);
  }
  op->backward_weight(dy, x, offsets, grads, options);
}

at::Tensor permute(const at::Tensor& x, const ExpertRows& rows) {
  const auto op = permute_slot().changed();
  if (!op) [[likely]]
    return detail::permute(x, rows);
  return slot_result(
      permute_slot(), "rows", op->forward(x, rows), {rows.token.size(0), x.size(1)}, x);
}

at::Tensor unpermute(const at::Tensor& y,
                     const ExpertRows& rows,
                     const at::Tensor& weight,
                     const at::Tensor& residual,
                     const ComputeOptions& options) {
  const auto op = unpermute_slot().changed();
  if (!op) [[likely]]
    return detail::unpermute(y, rows, weight, residual, options);
  return slot_result(unpermute_slot(),
                     "y",
                     op->forward(y, rows, weight, residual, options),
                     {rows.slot.size(0), y.size(1)},
                     y);
}

}  // namespace banyan::ops
