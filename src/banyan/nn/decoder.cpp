#include "banyan/nn/decoder.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/nn/mlp.h"
#include "banyan/nn/moe.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/parallel/pipeline_stage.h"

namespace banyan::nn {

Decoder::Decoder(ParamTable& table,
                 const DecoderOptions& shape,
                 const ComputeOptions& options,
                 bool with_backward)
    : table_(table),
      shape_(shape),
      options_(options),
      rope_(shape.rope, shape.head_dim, shape.max_positions, options) {
  const parallel::PipelineStage* stage = shape.stage;
  const bool has_ids = stage == nullptr || stage->is_first_rank();
  const bool has_head = stage == nullptr || stage->is_last_rank();
  const bool is_tied = shape.tied && shape.head == HeadKind::kVocabulary;
  using Parts = std::vector<Weight::Part>;
  if (has_ids || (has_head && is_tied)) {
    embedding_ = std::make_unique<Weight>(table,
                                          Parts{{"model.embed_tokens.weight", shape.vocab}},
                                          shape.hidden,
                                          options,
                                          with_backward && is_tied && has_head);
  }
  if (has_head) {
    norm_ = std::make_unique<Vector>(
        table, std::vector<Vector::Part>{{"model.norm.weight", shape.hidden}}, options);
  }
  for (int64_t c = 0; c < (stage == nullptr ? 1 : stage->num_chunks()); ++c) {
    const parallel::LayerRange range =
        stage == nullptr ? parallel::LayerRange{0, shape.layers} : stage->layers(c);
    chunks_.push_back({layers_.size(), static_cast<size_t>(range.count())});
    if (stage != nullptr) chunks_.back().is_first = stage->is_first(c);
    if (stage != nullptr) chunks_.back().is_last = stage->is_last(c);
    add_layers(range, with_backward);
  }
  table.set_unit(0);
  if (!has_head) return;
  if (shape.head == HeadKind::kValue) {
    value_head_ = std::make_unique<ValueHead>(table, shape.hidden, shape.value_bias, options);
  } else if (!shape.tied) {
    head_ = std::make_unique<Weight>(
        table, Parts{{"lm_head.weight", shape.vocab}}, shape.hidden, options, with_backward);
  }
}

void Decoder::add_layers(const parallel::LayerRange& range, bool with_backward) {
  for (int64_t i = range.begin; i < range.end; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    table_.set_unit(1 + i);
    layers_.emplace_back(
        new Layer{Attention(table_, prefix, shape_, options_, with_backward), nullptr, i});
    if (shape_.moe.has_experts(i)) {
      layers_.back()->mlp = std::make_unique<Moe>(table_, prefix, shape_, options_, with_backward);
    } else {
      layers_.back()->mlp = std::make_unique<Mlp>(table_, prefix, shape_, options_, with_backward);
    }
  }
}

Weight& Decoder::head() {
  BANYAN_ASSERT(!value_head_, "decoder: a model with a value head has no vocabulary head");
  BANYAN_ASSERT(head_ || (shape_.tied && norm_), "decoder: the head is on the last stage");
  return head_ ? *head_ : *embedding_;
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

ActivationBytes Decoder::activation_bytes(const Chunk& chunk) const {
  DecoderOptions shape = shape_;
  if (shape_.stage != nullptr) shape.layers = static_cast<int64_t>(chunk.count);
  const int64_t first = chunk.count > 0 ? layer(chunk, 0).number : 0;
  ActivationBytes bytes = nn::activation_bytes(shape, options_, recompute_, first);
  if (!chunk.is_first) bytes.kept -= static_cast<int64_t>(sizeof(int32_t));
  if (!chunk.is_last) bytes.kept -= kept_row_bytes(shape, options_);
  return bytes;
}

ActivationBytes Decoder::activation_bytes() const {
  ActivationBytes all;
  for (const Chunk& chunk : chunks_) {
    const ActivationBytes bytes = activation_bytes(chunk);
    all.kept += bytes.kept;
    all.again = std::max(all.again, bytes.again);
    all.working = std::max(all.working, bytes.working);
  }
  return all;
}

at::Tensor Decoder::forward(const at::Tensor& input,
                            const at::Tensor& positions,
                            AttentionContext& attention,
                            Saved* saved,
                            int64_t which) {
  const Chunk& chunk = chunks_.at(which);
  const int64_t num_tokens = positions.numel();
  BANYAN_CHECK(positions.dim() == 1 && num_tokens > 0 && input.dim() == (chunk.is_first ? 1 : 2) &&
                   (!chunk.is_first || input.sizes() == positions.sizes()),
               "[decoder] ids and positions: wanted [T] with T >= 1 alike, got ",
               input.sizes(),
               " and ",
               positions.sizes());
  rope_.reserve(positions.max().item<int64_t>() + 1);
  if (saved) {
    if (chunk.is_first) saved->ids = input;
    saved->positions = positions;
    saved->layers.resize(chunk.count);
    saved->again_bytes = activation_bytes(chunk).again * num_tokens;
  }
  at::Tensor x = chunk.is_first ? embed(input) : input;
  for (int64_t i = 0; i < static_cast<int64_t>(chunk.count); ++i) {
    Layer& each = layer(chunk, i);
    const int64_t unit = recompute_.unit_of(i);
    if (saved && unit == i) saved->layers[i].attention.x = x;
    Saved::Layer* kept = saved && unit < 0 ? &saved->layers[i] : nullptr;
    const LayerContext context{each.number, positions, rope_, attention, routers_};
    table_.enter(1 + each.number);
    x = each.attention.forward(context, x, kept ? &kept->attention : nullptr);
    if (kept && recompute_.drops_core_attn())
      kept->attention.out = kept->attention.lse = at::Tensor();
    x = each.mlp->forward(context, x, kept ? &kept->mlp : nullptr);
    table_.leave(1 + each.number);
    if (kept && recompute_.drops_gate_up(shape_.moe.has_experts(each.number))) {
      kept->mlp.gate_up = at::Tensor();
    }
  }
  if (!chunk.is_last) return x;
  if (saved) saved->x = x;
  return parallel::gather_rows(
      shape_.tensor,
      ops::rms_norm_forward(x, norm_->compute(), shape_.norm_eps, options_),
      num_tokens);
}

// Ranks without a token's row add zeros.
at::Tensor Decoder::embed(const at::Tensor& ids) const {
  if (shape_.tensor == nullptr) return ops::embedding_forward(ids, embedding_->compute());
  const parallel::TensorParallel::OwnTokens own = shape_.tensor->own_tokens(ids);
  at::Tensor rows = ops::embedding_forward(own.ids, embedding_->compute());
  rows.masked_fill_(own.is_here.logical_not().unsqueeze(1), 0.0);
  return shape_.tensor->sum_rows(std::move(rows));
}

void Decoder::embed_backward(const at::Tensor& dx, const at::Tensor& ids) {
  if (shape_.tensor == nullptr) return ops::embedding_backward(dx, ids, embedding_->grad());
  const at::Tensor rows = shape_.tensor->gather_rows(dx, ids.numel());
  const parallel::TensorParallel::OwnTokens own = shape_.tensor->own_tokens(ids);
  const at::Tensor here = own.is_here.nonzero().squeeze(1);
  if (here.numel() == 0) return;
  ops::embedding_backward(
      rows.index_select(0, here), own.ids.index_select(0, here), embedding_->grad());
}

// The last layer of a unit runs again right before its backward, under one use.
std::vector<UnitUse> Decoder::unit_uses(Pass pass, int64_t which) const {
  const Chunk& chunk = chunks_.at(which);
  const auto unit_of = [&](int64_t i) { return 1 + layer(chunk, i).number; };
  std::vector<UnitUse> uses;
  const auto layers = static_cast<int64_t>(chunk.count);
  if (pass == Pass::kForward) {
    for (int64_t i = 0; i < layers; ++i) uses.push_back({unit_of(i), false});
    return uses;
  }
  int64_t made = layers;  // layers from here on have what their backward needs
  for (int64_t i = layers; i-- > 0;) {
    const int64_t unit = recompute_.unit_of(i);
    if (unit >= 0 && i < made) {
      for (int64_t j = unit; j < i; ++j) uses.push_back({unit_of(j), false});
      made = unit;
    }
    uses.push_back({unit_of(i), true});
  }
  return uses;
}

void Decoder::run_again(
    const Chunk& chunk, int64_t first, int64_t end, Saved& saved, AttentionContext& attention) {
  const profile::PhaseScope phase(profile::Phase::kRecompute);
  at::Tensor x = saved.layers[first].attention.x;
  for (int64_t i = first; i < end; ++i) {
    Layer& each = layer(chunk, i);
    const LayerContext context{each.number, saved.positions, rope_, attention};
    Saved::Layer& kept = saved.layers[i];
    table_.enter(1 + each.number);
    x = each.attention.forward(context, x, &kept.attention);
    if (i + 1 < end) {
      x = each.mlp->forward(context, x, &kept.mlp);
      table_.leave(1 + each.number);
    } else {
      kept.mlp.x = x;  // the unit's output is not wanted: its backward makes gate and up
    }
  }
}

at::Tensor Decoder::backward(Saved saved,
                             const at::Tensor& grad_hidden,
                             AttentionContext& attention,
                             int64_t which) {
  const Chunk& chunk = chunks_.at(which);
  at::Tensor dx = grad_hidden;
  if (chunk.is_last) {
    BANYAN_ASSERT(norm_->grad().defined(),
                  "gradients are not allocated: ParamTable::ensure_grads first");
    if (shape_.tensor != nullptr) dx = shape_.tensor->own_rows(grad_hidden);
    dx = ops::rms_norm_backward(
        dx, saved.x, norm_->compute(), shape_.norm_eps, norm_->grad(), options_);
    saved.x = at::Tensor();
  }
  for (auto i = static_cast<int64_t>(chunk.count); i-- > 0;) {
    Layer& each = layer(chunk, i);
    const int64_t unit = recompute_.unit_of(i);
    if (unit >= 0 && !saved.layers[i].mlp.x.defined()) {
      run_again(chunk, unit, i + 1, saved, attention);
    } else {
      table_.enter(1 + each.number);
    }
    const LayerContext context{each.number, saved.positions, rope_, attention, routers_};
    dx = each.mlp->backward(context, dx, std::move(saved.layers[i].mlp));
    dx = each.attention.backward(context, dx, std::move(saved.layers[i].attention));
    table_.leave(1 + each.number);
  }
  if (!chunk.is_first) return dx;
  embed_backward(dx, saved.ids);
  return {};
}

void Decoder::idle(Pass pass, int64_t which) {
  const Chunk& chunk = chunks_.at(which);
  const auto num_layers = static_cast<int64_t>(chunk.count);
  const auto forward = [&](int64_t i) { layer(chunk, i).mlp->idle_forward(); };
  if (pass == Pass::kForward) {
    for (int64_t i = 0; i < num_layers; ++i) forward(i);
    return;
  }
  for (int64_t i = num_layers; i-- > 0;) {
    const int64_t unit = recompute_.unit_of(i);
    const bool is_last = i + 1 == num_layers || recompute_.unit_of(i + 1) != unit;
    for (int64_t k = unit; unit >= 0 && is_last && k < i; ++k) forward(k);
    layer(chunk, i).mlp->idle_backward();
  }
}

}  // namespace banyan::nn
