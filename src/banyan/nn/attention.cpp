#include "banyan/nn/attention.h"

#include <ATen/ops/empty_like.h>

#include <cmath>

#include "banyan/core/profile.h"
#include "banyan/ops/one_owner.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/rope.h"

namespace banyan::nn {

Attention::Attention(ParamTable& table,
                     const std::string& prefix,
                     const DecoderOptions& shape,
                     const ComputeOptions& options,
                     bool with_backward)
    : shape_(shape),
      options_(options),
      scale_(1.0 / std::sqrt(static_cast<double>(shape.head_dim))),
      norm_(table, {{prefix + "input_layernorm.weight", shape.hidden}}, options),
      qkv_(table,
           {{prefix + "self_attn.q_proj", shape.heads * shape.head_dim},
            {prefix + "self_attn.k_proj", shape.kv_heads * shape.head_dim},
            {prefix + "self_attn.v_proj", shape.kv_heads * shape.head_dim}},
           shape.hidden,
           shape.qkv_bias,
           options,
           with_backward),
      out_(table,
           {{prefix + "self_attn.o_proj", shape.hidden}},
           shape.heads * shape.head_dim,
           shape.out_bias,
           options,
           with_backward) {
  if (shape.qk_norm) {
    const auto head_norm = [&](const char* name) {
      return std::make_unique<Vector>(
          table,
          std::vector<Vector::Part>{{prefix + "self_attn." + name, shape.head_dim}},
          options);
    };
    q_norm_ = head_norm("q_norm.weight");
    k_norm_ = head_norm("k_norm.weight");
  }
}

Attention::Heads Attention::split(const at::Tensor& qkv) const {
  const auto part = [&](int64_t first_head, int64_t num_heads) {
    return qkv.narrow(1, first_head * shape_.head_dim, num_heads * shape_.head_dim)
        .view({qkv.size(0), num_heads, shape_.head_dim});
  };
  const int64_t heads = shape_.heads;
  const int64_t kv_heads = shape_.kv_heads;
  return {part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)};
}

Attention::Heads Attention::attending(const LayerContext& context, const at::Tensor& qkv) const {
  Heads heads = split(qkv);
  if (!shape_.qk_norm) return heads;
  const auto rotated = [&](const at::Tensor& raw, const Vector& norm) {
    at::Tensor x = ops::rms_norm_forward(raw, norm.compute(), shape_.norm_eps, options_);
    return ops::rope_forward(
        x, context.positions, context.rope.cos(), context.rope.sin(), options_);
  };
  return {rotated(heads.q, *q_norm_), rotated(heads.k, *k_norm_), heads.v};
}

void Attention::rotate(const LayerContext& context, at::Tensor& qkv) const {
  if (!ops::has_one_owner(qkv)) qkv = qkv.clone();  // a replaced op may have kept it
  const int64_t heads = shape_.heads + shape_.kv_heads;
  at::Tensor q_and_k =
      qkv.narrow(1, 0, heads * shape_.head_dim).view({qkv.size(0), heads, shape_.head_dim});
  ops::rope_forward_into(
      q_and_k, context.positions, context.rope.cos(), context.rope.sin(), options_, q_and_k);
}

at::Tensor Attention::normed(const LayerContext& context, const at::Tensor& x) const {
  return parallel::gather_rows(shape_.tensor,
                               ops::rms_norm_forward(x, norm_.compute(), shape_.norm_eps, options_),
                               context.positions.numel());
}

at::Tensor Attention::forward(const LayerContext& context,
                              const at::Tensor& x,
                              Saved* saved) const {
  const profile::Scope timed("attention half");
  at::Tensor qkv = qkv_.forward(normed(context, x));
  if (!shape_.qk_norm) rotate(context, qkv);
  const Heads heads = attending(context, qkv);
  at::Tensor lse;
  at::Tensor out = context.attention.forward(
      context.layer, heads.q, heads.k, heads.v, scale_, saved ? &lse : nullptr);
  at::Tensor y = out_.forward_summed(shape_.tensor, out.flatten(1), x);
  if (saved) *saved = {x, std::move(qkv), std::move(out), std::move(lse)};
  return y;
}

void Attention::fill(kernels::PassLayer& layer) const {
  layer.input_norm = norm_.bits();
  layer.qkv = qkv_.product();
  layer.q_norm = q_norm_ ? q_norm_->bits() : nullptr;
  layer.k_norm = k_norm_ ? k_norm_->bits() : nullptr;
  layer.out = out_.product();
}

void Attention::head_backward(const LayerContext& context,
                              const at::Tensor& grad,
                              const at::Tensor& raw,
                              const std::unique_ptr<Vector>& norm,
                              at::Tensor& out) const {
  const at::Tensor& cos = context.rope.cos();
  const at::Tensor& sin = context.rope.sin();
  if (!norm) {
    ops::rope_backward_into(grad, context.positions, cos, sin, options_, out);
    return;
  }
  out.copy_(ops::rms_norm_backward(ops::rope_backward(grad, context.positions, cos, sin, options_),
                                   raw,
                                   norm->compute(),
                                   shape_.norm_eps,
                                   norm->grad(),
                                   options_));
}

at::Tensor Attention::backward(const LayerContext& context, const at::Tensor& dy, Saved saved) {
  const profile::Scope timed("attention half");
  at::Tensor grad_out;
  at::Tensor dqkv;
  {
    const Heads heads = attending(context, saved.qkv);
    if (!saved.out.defined()) {
      const profile::PhaseScope phase(profile::Phase::kRecompute);
      saved.out =
          context.attention.forward(context.layer, heads.q, heads.k, heads.v, scale_, &saved.lse);
    }
    const at::Tensor dy_rows = parallel::gather_rows(shape_.tensor, dy, saved.out.size(0));
    grad_out = out_.backward(dy_rows, saved.out.flatten(1)).view(saved.out.sizes());
    AttentionGradients grad = context.attention.backward(
        context.layer, grad_out, heads.q, heads.k, heads.v, saved.out, saved.lse, scale_);
    const Heads raw = split(saved.qkv);
    dqkv = at::empty_like(saved.qkv);
    Heads parts = split(dqkv);
    head_backward(context, grad.dq, raw.q, q_norm_, parts.q);
    head_backward(context, grad.dk, raw.k, k_norm_, parts.k);
    parts.v.copy_(grad.dv);
  }
  grad_out = saved.qkv = saved.out = saved.lse = at::Tensor();
  const at::Tensor dh =
      parallel::sum_rows(shape_.tensor, qkv_.backward(dqkv, normed(context, saved.x)));
  return ops::rms_norm_backward(
      dh, saved.x, norm_.compute(), shape_.norm_eps, norm_.grad(), options_, dy);
}

}  // namespace banyan::nn
