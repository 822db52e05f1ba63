#include "banyan/nn/mlp.h"

#include "banyan/core/profile.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/swiglu.h"

namespace banyan::nn {

Mlp::Mlp(ParamTable& table,
         const std::string& prefix,
         const DecoderOptions& shape,
         const ComputeOptions& options,
         bool with_backward)
    : options_(options),
      norm_eps_(shape.norm_eps),
      tensor_(shape.tensor),
      norm_(table, {{prefix + "post_attention_layernorm.weight", shape.hidden}}, options),
      gate_up_(table,
               {{prefix + "mlp.gate_proj", shape.intermediate},
                {prefix + "mlp.up_proj", shape.intermediate}},
               shape.hidden,
               shape.mlp_bias,
               options,
               with_backward),
      down_(table,
            {{prefix + "mlp.down_proj", shape.hidden}},
            shape.intermediate,
            shape.mlp_bias,
            options,
            with_backward) {}

// With sequence parallel all rows and the padding behind them, which stays without effect.
at::Tensor Mlp::normed(const at::Tensor& x) const {
  return parallel::gather_rows(tensor_,
                               ops::rms_norm_forward(x, norm_.compute(), norm_eps_, options_));
}

at::Tensor Mlp::forward(const LayerContext& /*context*/, const at::Tensor& x, Saved* saved) const {
  const profile::Scope timed("feed-forward half");
  at::Tensor gate_up = gate_up_.forward(normed(x));
  at::Tensor y = down_.forward_summed(tensor_, ops::swiglu_forward(gate_up, options_), x);
  if (saved) *saved = {.x = x, .gate_up = std::move(gate_up)};
  return y;
}

void Mlp::fill(kernels::PassLayer& layer) const {
  layer.post_norm = norm_.bits();
  layer.gate_up = gate_up_.product();
  layer.down = down_.product();
}

at::Tensor Mlp::backward(const LayerContext& /*context*/, const at::Tensor& dy, Saved saved) {
  const profile::Scope timed("feed-forward half");
  at::Tensor h;
  if (!saved.gate_up.defined()) {
    const profile::PhaseScope phase(profile::Phase::kRecompute);
    h = normed(saved.x);
    saved.gate_up = gate_up_.forward(h);
  }
  at::Tensor dgate_up;
  {
    const at::Tensor dy_rows = parallel::gather_rows(tensor_, dy);
    ops::SwigluGradients act =
        ops::swiglu_backward(down_.backward_input(dy_rows), std::move(saved.gate_up), options_);
    down_.backward_weight(dy_rows, act.y);
    dgate_up = std::move(act.gate_up);
  }
  if (!h.defined()) h = normed(saved.x);
  const at::Tensor dh = parallel::sum_rows(tensor_, gate_up_.backward(dgate_up, h));
  return ops::rms_norm_backward(
      dh, saved.x, norm_.compute(), norm_eps_, norm_.grad(), options_, dy);
}

}  // namespace banyan::nn
