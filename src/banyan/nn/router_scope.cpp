#include "banyan/nn/router_scope.h"

#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::nn {
namespace {

at::Tensor ones_if_undefined(const at::Tensor& multiplicity, int64_t tokens) {
  return multiplicity.defined() ? multiplicity : at::ones({tokens}, at::kDouble);
}

}  // namespace

RouterScope::RouterScope(const RouterLosses& losses,
                         int64_t layers,
                         int64_t num_experts,
                         int64_t num_chosen)
    : losses_(losses),
      num_experts_(num_experts),
      num_chosen_(num_chosen),
      sums_(at::zeros({layers, 2 * num_experts + 2}, at::kDouble)) {}

void RouterScope::count(int64_t layer,
                        const ops::Routing& routing,
                        const at::Tensor& multiplicity) {
  BANYAN_ASSERT(!closed_, "router scope: a forward is counted after the end of the scope");
  const int64_t tokens = routing.logits.size(0);
  const at::Tensor m = ones_if_undefined(multiplicity, tokens);
  const at::Tensor logits = routing.logits.to(at::kCPU, at::kDouble);
  at::Tensor sums = sums_.select(0, layer);
  const at::Tensor chosen = routing.choice.to(at::kCPU).flatten();
  const at::Tensor weight = m.unsqueeze(1).expand({tokens, num_chosen_}).reshape({-1});
  sums.narrow(0, 0, num_experts_).index_add_(0, chosen, weight);
  sums.narrow(0, num_experts_, num_experts_)
      .add_(at::softmax(logits, -1).mul_(m.unsqueeze(1)).sum({0}));
  sums.narrow(0, 2 * num_experts_, 1)
      .add_(at::logsumexp(logits, {1}, /*keepdim=*/false).square_().mul_(m).sum());
  sums.narrow(0, 2 * num_experts_ + 1, 1).add_(m.sum());
}

// A stage has zeros for the layers of the others.
void RouterScope::close(parallel::Collectives* ranks, parallel::Collectives* stages) {
  if (!parallel::is_alone(ranks)) ranks->all_reduce_sum(sums_);
  if (!parallel::is_alone(stages)) stages->all_reduce_sum(sums_);
  counting_ = false;
  closed_ = true;
}

std::optional<ops::RouterPenalty> RouterScope::penalty(int64_t layer,
                                                       const at::Tensor& multiplicity,
                                                       const ops::Routing& routing) const {
  if (!has_losses()) return std::nullopt;
  BANYAN_ASSERT(closed_, "router scope: a backward comes before the end of the scope");
  const at::Tensor sums = sums_.select(0, layer);
  const double total = sums[2 * num_experts_ + 1].item<double>();
  ops::RouterPenalty penalty;
  penalty.multiplicity = ones_if_undefined(multiplicity, routing.logits.size(0));
  if (losses_.balance_coef != 0.0) {
    const auto experts = static_cast<double>(num_experts_);
    const auto chosen = static_cast<double>(num_chosen_);
    penalty.slope = sums.narrow(0, 0, num_experts_)
                        .mul(losses_.balance_coef * experts / (chosen * total * total));
  }
  penalty.z_slope = 2.0 * losses_.z_coef / total;
  return penalty;
}

RouterFigures RouterScope::figures() const {
  RouterFigures figures;
  int64_t layers = 0;
  for (int64_t layer = 0; layer < sums_.size(0); ++layer) {
    const double* sums = sums_.const_data_ptr<double>() + layer * sums_.size(1);
    const double total = sums[2 * num_experts_ + 1];
    if (total == 0.0) continue;
    ++layers;
    const double share = static_cast<double>(num_experts_) / static_cast<double>(num_chosen_);
    double balance = 0.0;
    for (int64_t i = 0; i < num_experts_; ++i) {
      balance += share * (sums[i] / total) * (sums[num_experts_ + i] / total);
      figures.max_load = std::max(figures.max_load, share * sums[i] / total);
    }
    figures.balance += balance;
    figures.z += sums[2 * num_experts_] / total;
  }
  if (layers == 0) return figures;
  figures.loss = losses_.balance_coef * figures.balance + losses_.z_coef * figures.z;
  figures.balance /= static_cast<double>(layers);
  figures.z /= static_cast<double>(layers);
  return figures;
}

}  // namespace banyan::nn
