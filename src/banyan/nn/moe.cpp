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
      moe_(shape.moe),
      tensor_(shape.tensor),
      router_{.num_chosen = shape.moe.num_chosen,
              .renormalise = shape.moe.renormalise,
              .in_double = shape.moe.router_in_double},
      norm_(table, {{prefix + "post_attention_layernorm.weight", shape.hidden}}, options),
      gate_(table,
            {{prefix + "mlp.gate.weight", shape.moe.num_experts}},
            shape.hidden,
            options,
            with_backward) {
  const int64_t width = shape.moe.intermediate;
  const size_t before = table.params().size();
  const int64_t num_own = moe_.num_experts / (moe_.ranks == nullptr ? 1 : moe_.ranks->size());
  const int64_t first = moe_.ranks == nullptr ? 0 : moe_.ranks->rank() * num_own;
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
    Param& param = table.params()[i];
    param.is_dealt = !parallel::is_alone(moe_.ranks) || is_apart();
    if (parallel::is_alone(moe_.parts)) continue;
    const int64_t dim = param.name.ends_with("down_proj.weight") ? 1 : 0;
    param.cut = {dim, moe_.first_intermediate, moe_.whole_intermediate};
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

at::Tensor Moe::brought(const at::Tensor& x) const {
  if (!is_apart() || tensor_ == nullptr) return x;
  const parallel::Part run = tensor_->run_of(x.size(0));
  return x.narrow(0, run.begin, run.count);
}

at::Tensor Moe::dy_brought(const at::Tensor& dy, int64_t num_tokens) const {
  if (!is_apart() || tensor_ == nullptr) return parallel::gather_rows(tensor_, dy, num_tokens);
  const parallel::Part run = tensor_->run_of(num_tokens);
  return dy.narrow(0, tensor_->is_sequence_parallel() ? 0 : run.begin, run.count);
}

at::Tensor Moe::to_stream(at::Tensor y, int64_t num_tokens) const {
  if (tensor_ == nullptr) return y;
  return is_apart() ? tensor_->rows_from_runs(y, num_tokens) : tensor_->sum_rows(std::move(y));
}

at::Tensor Moe::forward(const LayerContext& context, const at::Tensor& x, Saved* saved) const {
  const profile::Scope timed("feed-forward half");
  const at::Tensor h = normed(context, x);
  const ops::Routing routing = ops::route(h, gate_.compute(), router_, options_);
  if (context.routers != nullptr && context.routers->is_counting()) {
    context.routers->count(context.layer, routing, context.attention.multiplicity());
  }
  const ops::ExpertRows rows = ops::sort_by_expert(brought(routing.choice), moe_.num_experts);
  at::Tensor gate_up;
  at::Tensor out = ops::permute(brought(h), rows);
  if (!sends_rows()) {
    out = experts_forward(out, rows.offsets, saved && !is_apart() ? &gate_up : nullptr);
  } else {
    const parallel::ExpertExchange exchange = exchange_of(rows.offsets);
    out = exchange.to_tokens(
        experts_forward(exchange.to_experts(out), exchange.offsets(), /*gate_up=*/nullptr));
  }
  const at::Tensor weight = brought(ops::routing_weights(routing, router_));
  at::Tensor y =
      tensor_ == nullptr
          ? ops::unpermute(out, rows, weight, /*residual=*/x, options_)
          : to_stream(ops::unpermute(out, rows, weight, /*residual=*/{}, options_), h.size(0))
                .add_(x);
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
  const ops::ExpertRows rows = ops::sort_by_expert(brought(routing.choice), moe_.num_experts);
  const int64_t num_tokens = h.size(0);
  Rows own{
      ops::permute(brought(h), rows),
      ops::permute(dy_brought(dy, num_tokens), rows),
      ops::weight_of_rows(brought(ops::routing_weights(routing, router_)), rows, options_.dtype)};
  RowGradients grads;
  if (!sends_rows()) {
    grads = experts_backward(own, rows.offsets, std::move(saved.gate_up));
  } else {
    const parallel::ExpertExchange exchange = exchange_of(rows.offsets);
    own = {
        exchange.to_experts(own.h), exchange.to_experts(own.dy), exchange.to_experts(own.weight)};
    grads = experts_backward(own, exchange.offsets(), {});
    grads = {exchange.to_tokens(grads.h), exchange.to_tokens(grads.weight)};
  }
  at::Tensor of_weight = ops::to_choices(grads.weight, rows);
  if (tensor_ != nullptr && is_apart()) {
    of_weight = tensor_->gather_runs(of_weight, num_tokens);
  } else if (tensor_ != nullptr) {
    tensor_->ranks().all_reduce_sum(of_weight);
  }
  std::optional<ops::RouterPenalty> penalty;
  if (context.routers != nullptr) {
    penalty = context.routers->penalty(context.layer, context.attention.multiplicity(), routing);
  }
  const at::Tensor dlogits =
      ops::routing_backward(routing, of_weight, router_, penalty ? &*penalty : nullptr)
          .to(options_.dtype);
  ops::linear_backward_weight(dlogits, h, gate_.grad(), /*grad_bias=*/{}, options_);
  at::Tensor dh = to_stream(ops::unpermute(grads.h, rows, /*weight=*/{}, /*residual=*/{}, options_),
                            num_tokens);
  const at::Tensor of_router = ops::linear_backward_input(dlogits, gate_.compute());
  dh.add_(tensor_ == nullptr ? of_router : tensor_->own_rows(of_router));
  return ops::rms_norm_backward(
      dh, saved.x, norm_.compute(), norm_eps_, norm_.grad(), options_, dy);
}

parallel::ExpertExchange Moe::empty_exchange() const {
  return exchange_of(std::vector<int64_t>(moe_.num_experts + 1, 0));
}

at::Tensor Moe::no_rows() const {
  return at::empty({0, gate_.compute().in},
                   at::TensorOptions(options_.dtype).device(options_.device));
}

// No rows of this rank's: the others' pass through the experts here.
void Moe::idle_forward() const {
  if (!sends_rows()) return;
  const parallel::ExpertExchange exchange = empty_exchange();
  const at::Tensor none = no_rows();
  exchange.to_tokens(experts_forward(exchange.to_experts(none), exchange.offsets(), nullptr));
}

void Moe::idle_backward() {
  if (!sends_rows()) return;
  const parallel::ExpertExchange exchange = empty_exchange();
  const at::Tensor none = no_rows();
  const at::Tensor weight = at::empty(
      {0}, none.options().dtype(options_.dtype == at::kDouble ? at::kDouble : at::kFloat));
  const Rows own{exchange.to_experts(none), exchange.to_experts(none), exchange.to_experts(weight)};
  const RowGradients grads = experts_backward(own, exchange.offsets(), {});
  exchange.to_tokens(grads.h);
  exchange.to_tokens(grads.weight);
}

}  // namespace banyan::nn
