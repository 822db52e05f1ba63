// The attention half of a decoder block: y = x + O attn(rope(norm(Q h)), rope(norm(K h)), V h), h =
// N1 x.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "banyan/nn/decoder_options.h"
#include "banyan/nn/layer_context.h"
#include "banyan/nn/linear.h"

namespace banyan::nn {

class Attention {
 public:
  // Kept from forward for backward; norm outputs are computed again from these, and so are out and
  // lse where they are missing.
  struct Saved {
    at::Tensor x;    // [T, E]; own rows with sequence parallel
    at::Tensor qkv;  // [T, (H + 2K) D]: after RoPE, or before the norm where heads have one
    at::Tensor out;  // [T, H, D]
    at::Tensor lse;  // [T, H] fp32
  };

  // `prefix`: "model.layers.0." The parameters are input_layernorm and self_attn.*.
  Attention(ParamTable& table,
            const std::string& prefix,
            const DecoderOptions& shape,
            const ComputeOptions& options,
            bool with_backward);

  // x [T, E] -> [T, E]. With `saved`, keeps what backward needs.
  at::Tensor forward(const LayerContext& context, const at::Tensor& x, Saved* saved) const;

  // Its weights for the rollout's pass (kernels/cpu/decoder_pass.h), borrowed. Native only.
  void fill(kernels::PassLayer& layer) const;

  // dy -> dx; adds the parameters' gradients. Consumes `saved`.
  at::Tensor backward(const LayerContext& context, const at::Tensor& dy, Saved saved);

 private:
  struct Heads {
    at::Tensor q;  // [T, H, D]
    at::Tensor k;  // [T, K, D]
    at::Tensor v;  // [T, K, D]
  };
  Heads split(const at::Tensor& qkv) const;  // views
  // What attends: views, of q and k normed and rotated anew where heads have a norm.
  Heads attending(const LayerContext& context, const at::Tensor& qkv) const;
  // Rotates q and k where they stand.
  void rotate(const LayerContext& context, at::Tensor& qkv) const;

  at::Tensor normed(const LayerContext& context, const at::Tensor& x) const;  // [T, E]

  // Back through RoPE and the per-head norm; `raw` is the projection before them. Writes its
  // gradient to `out`, whose rows may be parts of larger ones.
  void head_backward(const LayerContext& context,
                     const at::Tensor& grad,
                     const at::Tensor& raw,
                     const std::unique_ptr<Vector>& norm,
                     at::Tensor& out) const;

  DecoderOptions shape_;
  ComputeOptions options_;
  double scale_;
  Vector norm_;
  Linear qkv_;
  std::unique_ptr<Vector> q_norm_;
  std::unique_ptr<Vector> k_norm_;
  Linear out_;
};

}  // namespace banyan::nn
