// What the routers of a model choose over a scope of logical tokens, and the two auxiliary losses
// on it (trie specification A10). m_u is the number of samples that pass through a token, M their
// sum:
//   f_i = sum_u m_u [u chooses i] / (k M),   Pm_i = sum_u m_u P_ui / M
//   sum over layers of   balance_coef X sum_i f_i Pm_i  +  z_coef sum_u m_u lse_u² / M
// So a token that is computed once counts as often as it would be computed without sharing. f has
// no gradient. A scope is counted (one forward of each of its tokens), then closed; backwards
// behind that add the losses' gradient. The result does not depend on how the scope was cut into
// blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "banyan/ops/router.h"
#include "banyan/parallel/collectives.h"

namespace banyan::nn {

struct RouterLosses {
  double balance_coef = 0.0;  // Megatron's moe_aux_loss_coeff
  double z_coef = 0.0;        // moe_z_loss_coeff
};

// Means over the layers that have experts.
struct RouterFigures {
  double balance = 0.0;   // X sum_i f_i Pm_i: 1 where every expert gets the same
  double z = 0.0;         // mean of lse²
  double max_load = 0.0;  // of any layer: the most chosen expert's share times X
  double loss = 0.0;      // what the two losses add
};

class RouterScope {
 public:
  RouterScope(const RouterLosses& losses, int64_t layers, int64_t num_experts, int64_t num_chosen);

  bool has_losses() const { return losses_.balance_coef != 0.0 || losses_.z_coef != 0.0; }

  // Forwards that run from now on are counted, or not.
  void set_counting(bool counting) { counting_ = counting; }
  bool is_counting() const { return counting_; }
  // multiplicity [T] fp64, or undefined: one each.
  void count(int64_t layer, const ops::Routing& routing, const at::Tensor& multiplicity);

  // Adds what other ranks counted of the layers that are here, and takes what those of `stages`
  // counted of theirs; nothing is counted any more.
  void close(parallel::Collectives* ranks, parallel::Collectives* stages = nullptr);
  bool is_closed() const { return closed_; }
  // What the losses add to the gradient of a layer's logits, of a closed scope.
  std::optional<ops::RouterPenalty> penalty(int64_t layer,
                                            const at::Tensor& multiplicity,
                                            const ops::Routing& routing) const;
  RouterFigures figures() const;

 private:
  RouterLosses losses_;
  int64_t num_experts_;
  int64_t num_chosen_;
  bool counting_ = false;
  bool closed_ = false;
  at::Tensor sums_;  // [layers, 2 X + 2] fp64: chosen, probabilities, lse², M
};

}  // namespace banyan::nn
