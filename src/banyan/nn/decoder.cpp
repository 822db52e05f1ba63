#include "banyan/nn/decoder.h"

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/nn/mlp.h"
#include "banyan/nn/moe.h"
#include "banyan/ops/rms_norm.h"

namespace banyan::nn {

Decoder::Decoder(ParamTable& table,
                 const DecoderOptions& shape,
                 const ComputeOptions& options,
                 bool with_backward)
    : table_(table),
      shape_(shape),
      options_(options),
      rope_(shape.rope, shape.head_dim, shape.max_positions, options),
      embedding_(table,
                 {{"model.embed_tokens.weight", shape.vocab}},
                 shape.hidden,
                 options,
                 with_backward && shape.tied && shape.head == HeadKind::kVocabulary),
      norm_(table, {{"model.norm.weight", shape.hidden}}, options) {
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    table.set_unit(1 + i);
    layers_.emplace_back(
        new Layer{Attention(table, prefix, shape, options, with_backward), nullptr});
    if (shape.moe.has_experts(i)) {
      layers_.back()->mlp = std::make_unique<Moe>(table, prefix, shape, options, with_backward);
    } else {
      layers_.back()->mlp = std::make_unique<Mlp>(table, prefix, shape, options, with_backward);
    }
  }
  table.set_unit(0);
  if (shape.head == HeadKind::kValue) {
    value_head_ = std::make_unique<ValueHead>(table, shape.hidden, shape.value_bias, options);
  } else if (!shape.tied) {
    head_ = std::make_unique<Weight>(table,
                                     std::vector<Weight::Part>{{"lm_head.weight", shape.vocab}},
                                     shape.hidden,
                                     options,
                                     with_backward);
  }
}

Weight& Decoder::head() {
  BANYAN_ASSERT(!value_head_, "decoder: a model with a value head has no vocabulary head");
  return head_ ? *head_ : embedding_;
}

ValueHead& Decoder::value_head() {
  BANYAN_ASSERT(value_head_, "decoder: the model has no value head");
  return *value_head_;
}

int64_t Decoder::Saved::bytes() const {
  int64_t bytes = 0;
  const auto add = [&](std::initializer_list<const at::Tensor*> tensors) {
    for (const at::Tensor* tensor : tensors) {
      if (tensor->defined()) bytes += static_cast<int64_t>(tensor->nbytes());
    }
  };
  add({&ids, &positions, &x});
  for (const Layer& layer : layers) {
    add({&layer.attention.x, &layer.attention.qkv, &layer.attention.out, &layer.attention.lse});
    add({&layer.mlp.x, &layer.mlp.gate_up, &layer.mlp.router_logits, &layer.mlp.choice});
  }
  return bytes;
}

at::Tensor Decoder::forward(const at::Tensor& ids,
                            const at::Tensor& positions,
                            AttentionContext& attention,
                            Saved* saved) {
  BANYAN_CHECK(ids.dim() == 1 && ids.numel() > 0 && positions.sizes() == ids.sizes(),
               "[decoder] ids and positions: wanted [T] with T >= 1 alike, got ",
               ids.sizes(),
               " and ",
               positions.sizes());
  rope_.reserve(positions.max().item<int64_t>() + 1);
  if (saved) {
    saved->ids = ids;
    saved->positions = positions;
    saved->layers.resize(layers_.size());
    saved->again_bytes = activation_bytes().again * ids.numel();
  }
  at::Tensor x = embed(ids);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    const int64_t unit = recompute_.unit_of(layer);
    if (saved && unit == layer) saved->layers[i].attention.x = x;
    Saved::Layer* kept = saved && unit < 0 ? &saved->layers[i] : nullptr;
    const LayerContext context{layer, positions, rope_, attention, routers_};
    table_.enter(1 + layer);
    x = layers_[i]->attention.forward(context, x, kept ? &kept->attention : nullptr);
    if (kept && recompute_.drops_core_attn())
      kept->attention.out = kept->attention.lse = at::Tensor();
    x = layers_[i]->mlp->forward(context, x, kept ? &kept->mlp : nullptr);
    table_.leave(1 + layer);
    if (kept && recompute_.drops_gate_up(shape_.moe.has_experts(layer))) {
      kept->mlp.gate_up = at::Tensor();
    }
  }
  if (saved) saved->x = x;
  return parallel::gather_rows(shape_.tensor,
                               ops::rms_norm_forward(x, norm_.compute(), shape_.norm_eps, options_),
                               ids.numel());
}

// Ranks without a token's row add zeros.
at::Tensor Decoder::embed(const at::Tensor& ids) const {
  if (shape_.tensor == nullptr) return ops::embedding_forward(ids, embedding_.compute());
  const parallel::TensorParallel::OwnTokens own = shape_.tensor->own_tokens(ids);
  at::Tensor rows = ops::embedding_forward(own.ids, embedding_.compute());
  rows.masked_fill_(own.is_here.logical_not().unsqueeze(1), 0.0);
  return shape_.tensor->sum_rows(std::move(rows));
}

void Decoder::embed_backward(const at::Tensor& dx, const at::Tensor& ids) {
  if (shape_.tensor == nullptr) return ops::embedding_backward(dx, ids, embedding_.grad());
  const at::Tensor rows = shape_.tensor->gather_rows(dx, ids.numel());
  const parallel::TensorParallel::OwnTokens own = shape_.tensor->own_tokens(ids);
  const at::Tensor here = own.is_here.nonzero().squeeze(1);
  if (here.numel() == 0) return;
  ops::embedding_backward(
      rows.index_select(0, here), own.ids.index_select(0, here), embedding_.grad());
}

// The last layer of a unit runs again right before its backward, under one use.
std::vector<UnitUse> Decoder::unit_uses(Pass pass) const {
  std::vector<UnitUse> uses;
  const auto layers = static_cast<int64_t>(layers_.size());
  if (pass == Pass::kForward) {
    for (int64_t i = 0; i < layers; ++i) uses.push_back({1 + i, false});
    return uses;
  }
  int64_t made = layers;  // layers from here on have what their backward needs
  for (int64_t i = layers; i-- > 0;) {
    const int64_t unit = recompute_.unit_of(i);
    if (unit >= 0 && i < made) {
      for (int64_t j = unit; j < i; ++j) uses.push_back({1 + j, false});
      made = unit;
    }
    uses.push_back({1 + i, true});
  }
  return uses;
}

void Decoder::run_again(int64_t first, int64_t end, Saved& saved, AttentionContext& attention) {
  const profile::PhaseScope phase(profile::Phase::kRecompute);
  at::Tensor x = saved.layers[first].attention.x;
  for (int64_t i = first; i < end; ++i) {
    const LayerContext context{i, saved.positions, rope_, attention};
    Saved::Layer& kept = saved.layers[i];
    table_.enter(1 + i);
    x = layers_[i]->attention.forward(context, x, &kept.attention);
    if (i + 1 < end) {
      x = layers_[i]->mlp->forward(context, x, &kept.mlp);
      table_.leave(1 + i);
    } else {
      kept.mlp.x = x;  // the unit's output is not wanted: its backward makes gate and up
    }
  }
}

void Decoder::backward(Saved saved, const at::Tensor& grad_hidden, AttentionContext& attention) {
  BANYAN_ASSERT(norm_.grad().defined(),
                "gradients are not allocated: ParamTable::ensure_grads first");
  const at::Tensor grad_rows =
      shape_.tensor != nullptr ? shape_.tensor->own_rows(grad_hidden) : grad_hidden;
  at::Tensor dx = ops::rms_norm_backward(
      grad_rows, saved.x, norm_.compute(), shape_.norm_eps, norm_.grad(), options_);
  saved.x = at::Tensor();
  for (size_t i = layers_.size(); i-- > 0;) {
    const int64_t unit = recompute_.unit_of(static_cast<int64_t>(i));
    if (unit >= 0 && !saved.layers[i].mlp.x.defined()) {
      run_again(unit, static_cast<int64_t>(i) + 1, saved, attention);
    } else {
      table_.enter(1 + static_cast<int64_t>(i));
    }
    const LayerContext context{
        static_cast<int64_t>(i), saved.positions, rope_, attention, routers_};
    dx = layers_[i]->mlp->backward(context, dx, std::move(saved.layers[i].mlp));
    dx = layers_[i]->attention.backward(context, dx, std::move(saved.layers[i].attention));
    table_.leave(1 + static_cast<int64_t>(i));
  }
  embed_backward(dx, saved.ids);
}

void Decoder::idle(Pass pass) {
  const auto num_layers = static_cast<int64_t>(layers_.size());
  if (pass == Pass::kForward) {
    for (const auto& layer : layers_) layer->mlp->idle_forward();
    return;
  }
  for (int64_t i = num_layers; i-- > 0;) {
    const int64_t unit = recompute_.unit_of(i);
    const bool is_last = i + 1 == num_layers || recompute_.unit_of(i + 1) != unit;
    for (int64_t k = unit; unit >= 0 && is_last && k < i; ++k) layers_[k]->mlp->idle_forward();
    layers_[i]->mlp->idle_backward();
  }
}

}  // namespace banyan::nn
