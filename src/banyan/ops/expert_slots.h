// Slots of the ops of a mixture-of-experts layer (ops/slots.h has the rules and the table).
//
// router: which experts. Its weights and gradients (routing_weights, routing_backward) are those of
// logits h Wᵀ, whatever stands here; the choice is free. permute and unpermute are each the other's
// backward.
#pragma once

#include <functional>

#include "banyan/feature/slot.h"
#include "banyan/ops/expert_rows.h"
#include "banyan/ops/grouped_linear.h"
#include "banyan/ops/router.h"

namespace banyan::ops {

struct RouterOp {
  std::function<decltype(route)> forward;
};

struct GroupedGemmOp {
  std::function<decltype(grouped_linear_forward)> forward;
  std::function<decltype(grouped_linear_backward_input)> backward_input;
  std::function<decltype(grouped_linear_backward_weight)> backward_weight;
};

struct PermuteOp {
  std::function<decltype(permute)> forward;
};

struct UnpermuteOp {
  std::function<decltype(unpermute)> forward;
};

feature::OpSlot<RouterOp>& router_slot();
feature::OpSlot<GroupedGemmOp>& grouped_gemm_slot();
feature::OpSlot<PermuteOp>& permute_slot();
feature::OpSlot<UnpermuteOp>& unpermute_slot();

}  // namespace banyan::ops
