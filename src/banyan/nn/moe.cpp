#include "banyan/nn/moe.h"

#include <ATen/ops/empty.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/swiglu.h"

namespace banyan::nn {
namespace {

std::vector<at::Tensor*> gradients_of(const std::vector<std::unique_ptr<Weight>>& weights) {
  std::vector<at::Tensor*> grads;
  for (const auto& weight : weights) grads.push_back(&weight->grad());
  return grads;
}

}  // namespace

Moe::Moe(ParamTable& table,
         const std::string& prefix,
         const DecoderOptions& shape,
         const ComputeOptions& options,
         bool with_backward)
    : options_(options),
      norm_eps_(shape.norm_eps),
      num_experts_(shape.moe.num_experts),
      ranks_(parallel::is_alone(shape.moe.ranks) ? nullptr : shape.moe.ranks),
      tensor_(shape.tensor),
      router_{.num_chosen = shape.moe.num_chosen,
              .renormalise = shape.moe.renormalise,
              .in_double = shape.moe.router_in_double},
      norm_(table, {{prefix + "post_attention_layernorm.weight", shape.hidden}}, options),
      gate_(table,
            {{prefix + "mlp.gate.weight", num_experts_}},
            shape.hidden,
            options,
            with_backward) {
  const int64_t width = shape.moe.intermediate;
  const size_t before = table.params().size();
  const int64_t num_own = ranks_ == nullptr ? num_experts_ : num_experts_ / ranks_->size();
  const int64_t first = ranks_ == nullptr ? 0 : ranks_->rank() * num_own;
  for (int64_t e = first; e < first + num_own; ++e) {
    const std::string expert = prefix + "mlp.experts." + std::to_string(e) + ".";
    const auto add = [&](std::vector<Weight::Part> parts, int64_t in) {
      return std::make_unique<Weight>(table, std::move(parts), in, options, with_backward);
    };
    gate_up_.push_back(add(
        {{expert + "gate_proj.weight", width}, {expert + "up_proj.weight", width}}, shape.hidden));
    down_.push_back(add({{expert + "down_proj.weight", shape.hidden}}, width));
  }
  for (size_t i = before; i < table.params().size(); ++i) {
    table.params()[i].is_dealt = ranks_ != nullptr;
  }
}

ops::ExpertWeights Moe::compute_of(const std::vector<std::unique_ptr<Weight>>& weights) const {
  ops::ExpertWeights out;
  for (const auto& weight : weights) out.push_back(&weight->compute());
  return out;
}

at::Tensor Moe::experts_forward(const at::Tensor& h,
                                const std::vector<int64_t>& offsets,
                                at::Tensor* gate_up) const {
  at::Tensor product = ops::grouped_linear_forward(h, offsets, compute_of(gate_up_));
  at::Tensor out = ops::grouped_linear_forward(
      ops::swiglu_forward(product, options_), offsets, compute_of(down_));
  if (gate_up) *gate_up = std::move(product);
  return out;
}

at::Tensor Moe::normed(const LayerContext& context, const at::Tensor& x) const {
  return parallel::gather_rows(tensor_,
                               ops::rms_norm_forward(x, norm_.compute(), norm_eps_, options_),
                               context.positions.numel());
}

at::Tensor Moe::forward(const LayerContext& context, const at::Tensor& x, Saved* saved) const {
  const profile::Scope timed("feed-forward half");
  const at::Tensor h = normed(context, x);
  const ops::Routing routing = ops::route(h, gate_.compute(), router_, options_);
  if (context.routers != nullptr && context.routers->is_counting()) {
    context.routers->count(context.layer, routing, context.attention.multiplicity());
  }
  const ops::ExpertRows rows = ops::sort_by_expert(routing.choice, num_experts_);
  at::Tensor gate_up;
  at::Tensor out = ops::permute(h, rows);
  if (ranks_ == nullptr) {
    out = experts_forward(out, rows.offsets, saved ? &gate_up : nullptr);
  } else {
    const parallel::ExpertExchange exchange(*ranks_, rows.offsets);
    out = exchange.to_tokens(
        experts_forward(exchange.to_experts(out), exchange.offsets(), /*gate_up=*/nullptr));
  }
  const at::Tensor weight = ops::routing_weights(routing, router_);
  at::Tensor y =
      tensor_ == nullptr
          ? ops::unpermute(out, rows, weight, /*residual=*/x, options_)
          : tensor_->sum_rows(ops::unpermute(out, rows, weight, /*residual=*/{}, options_)).add_(x);
  if (saved) *saved = {x, std::move(gate_up), routing.logits, routing.choice};
  return y;
}

void Moe::fill(kernels::PassLayer& /*layer*/) const {
  BANYAN_ASSERT(false, "the rollout's pass is for layers without experts");
}

Moe::RowGradients Moe::experts_backward(const Rows& rows,
                                        const std::vector<int64_t>& offsets,
                                        at::Tensor gate_up) {
  if (!gate_up.defined()) {
    const profile::PhaseScope phase(profile::Phase::kRecompute);
    gate_up = ops::grouped_linear_forward(rows.h, offsets, compute_of(gate_up_));
  }
  RowGradients out;
  at::Tensor dgate_up;
  {
    const at::Tensor g = ops::grouped_linear_backward_input(rows.dy, offsets, compute_of(down_));
    ops::SwigluGradients act = ops::swiglu_backward(
        ops::scale_rows(g, rows.weight, options_), std::move(gate_up), options_);
    out.weight = ops::dot_rows(g, act.y, options_);
    ops::grouped_linear_backward_weight(rows.dy,
                                        ops::scale_rows(act.y, rows.weight, options_),
                                        offsets,
                                        gradients_of(down_),
                                        options_);
    dgate_up = std::move(act.gate_up);
  }
  ops::grouped_linear_backward_weight(dgate_up, rows.h, offsets, gradients_of(gate_up_), options_);
  out.h = ops::grouped_linear_backward_input(dgate_up, offsets, compute_of(gate_up_));
  return out;
}

at::Tensor Moe::backward(const LayerContext& context, const at::Tensor& dy, Saved saved) {
  const profile::Scope timed("feed-forward half");
  const at::Tensor h = normed(context, saved.x);
  ops::Routing routing{saved.router_logits, saved.choice};
  if (!routing.logits.defined()) {
    const profile::PhaseScope phase(profile::Phase::kRecompute);
    routing = ops::route(h, gate_.compute(), router_, options_);
  }
  const ops::ExpertRows rows = ops::sort_by_expert(routing.choice, num_experts_);
  Rows own{ops::permute(h, rows),
           ops::permute(parallel::gather_rows(tensor_, dy, h.size(0)), rows),
           ops::weight_of_rows(ops::routing_weights(routing, router_), rows, options_.dtype)};
  RowGradients grads;
  if (ranks_ == nullptr) {
    grads = experts_backward(own, rows.offsets, std::move(saved.gate_up));
  } else {
    const parallel::ExpertExchange exchange(*ranks_, rows.offsets);
    own = {
        exchange.to_experts(own.h), exchange.to_experts(own.dy), exchange.to_experts(own.weight)};
    grads = experts_backward(own, exchange.offsets(), {});
    grads = {exchange.to_tokens(grads.h), exchange.to_tokens(grads.weight)};
  }
  if (tensor_ != nullptr) tensor_->ranks().all_reduce_sum(grads.weight);
  std::optional<ops::RouterPenalty> penalty;
  if (context.routers != nullptr) {
    penalty = context.routers->penalty(context.layer, context.attention.multiplicity(), routing);
  }
  const at::Tensor dlogits =
      ops::routing_backward(
          routing, ops::to_choices(grads.weight, rows), router_, penalty ? &*penalty : nullptr)
          .to(options_.dtype);
  ops::linear_backward_weight(dlogits, h, gate_.grad(), /*grad_bias=*/{}, options_);
  at::Tensor dh = parallel::sum_rows(
      tensor_, ops::unpermute(grads.h, rows, /*weight=*/{}, /*residual=*/{}, options_));
  const at::Tensor of_router = ops::linear_backward_input(dlogits, gate_.compute());
  dh.add_(tensor_ == nullptr ? of_router : tensor_->own_rows(of_router));
  return ops::rms_norm_backward(
      dh, saved.x, norm_.compute(), norm_eps_, norm_.grad(), options_, dy);
}

// No rows of this rank's: the others' pass through the experts here.
void Moe::idle_forward() const {
  if (ranks_ == nullptr) return;
  const parallel::ExpertExchange exchange(*ranks_, std::vector<int64_t>(num_experts_ + 1, 0));
  const at::Tensor none =
      at::empty({0, gate_.compute().in}, at::TensorOptions(options_.dtype).device(options_.device));
  exchange.to_tokens(experts_forward(exchange.to_experts(none), exchange.offsets(), nullptr));
}

void Moe::idle_backward() {
  if (ranks_ == nullptr) return;
  const parallel::ExpertExchange exchange(*ranks_, std::vector<int64_t>(num_experts_ + 1, 0));
  const auto like = at::TensorOptions(options_.device);
  const at::Tensor none = at::empty({0, gate_.compute().in}, like.dtype(options_.dtype));
  const at::Tensor weight =
      at::empty({0}, like.dtype(options_.dtype == at::kDouble ? at::kDouble : at::kFloat));
  const Rows own{exchange.to_experts(none), exchange.to_experts(none), exchange.to_experts(weight)};
  const RowGradients grads = experts_backward(own, exchange.offsets(), {});
  exchange.to_tokens(grads.h);
  exchange.to_tokens(grads.weight);
}

}  // namespace banyan::nn
