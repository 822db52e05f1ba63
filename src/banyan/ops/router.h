// The router of a mixture-of-experts layer (parallel specification section 7; the choice and its
// ties are transformers' Qwen3MoeSparseMoeBlock).
//   z = h Wᵀ,  P = softmax(z),  the k largest P_c of a row,  w_c = P_c, or P_c / sum of the chosen
// Logits and probabilities are fp32, or fp64. Among equal probabilities at::topk chooses. The bits
// of a row depend on the row alone where those of its logits do: with the native kernels always.
//
// Gradients go through the probabilities alone. With s the sum of the chosen:
//   dP_c = dw_c, or (dw_c - sum_j dw_j w_j) / s;   dz_i = P_i (dP_i - sum_j P_j dP_j)
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"
#include "banyan/ops/linear.h"

namespace banyan::ops {

struct RouterOptions {
  int64_t num_chosen = 1;  // k
  bool renormalise = false;
  bool in_double = false;  // logits and probabilities in fp64, whatever the model's type
};

struct Routing {
  at::Tensor logits;  // [T, X] fp32 (fp64)
  at::Tensor choice;  // [T, k] int64: experts, the most probable first
};

// h [T, E] compute dtype, weight [X, E].
Routing route(const at::Tensor& h,
              const LinearWeight& weight,
              const RouterOptions& router,
              const ComputeOptions& options);

// w [T, k] in the type of the logits.
at::Tensor routing_weights(const Routing& routing, const RouterOptions& router);

// What two auxiliary losses add to the gradient of the logits. With m the number of samples that
// pass through a token and M the sum of m over the scope:
//   balance  c X sum_i f_i Pm_i,  Pm_i = sum_t m_t P_ti / M:   dP_ti += m_t slope_i,  slope_i = c X
//            f_i / M
//   z        c sum_t m_t lse_t² / M:                           dz_ti += m_t z_slope lse_t P_ti,
//            z_slope = 2 c / M
struct RouterPenalty {
  at::Tensor multiplicity;  // [T] fp64: m
  at::Tensor slope;         // [X] fp64, or undefined
  double z_slope = 0.0;
};

// grad_weight [T, k] -> d(logits) [T, X] in their type.
at::Tensor routing_backward(const Routing& routing,
                            const at::Tensor& grad_weight,
                            const RouterOptions& router,
                            const RouterPenalty* penalty = nullptr);

}  // namespace banyan::ops
