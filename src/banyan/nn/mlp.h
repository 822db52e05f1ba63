// The feed-forward half of a decoder block: y = x + down(silu(gate h) * up h), h = N1 x. gate and
// up are one projection.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "banyan/nn/decoder_options.h"
#include "banyan/nn/feed_forward.h"
#include "banyan/nn/linear.h"

namespace banyan::nn {

class Mlp final : public FeedForward {
 public:
  // `prefix`: "model.layers.0." The parameters are post_attention_layernorm and mlp.*.
  Mlp(ParamTable& table,
      const std::string& prefix,
      const DecoderOptions& shape,
      const ComputeOptions& options,
      bool with_backward);

  at::Tensor forward(const LayerContext& context, const at::Tensor& x, Saved* saved) const override;
  void fill(kernels::PassLayer& layer) const override;
  at::Tensor backward(const LayerContext& context, const at::Tensor& dy, Saved saved) override;

 private:
  at::Tensor normed(const at::Tensor& x) const;

  ComputeOptions options_;
  double norm_eps_;
  const parallel::TensorParallel* tensor_;
  Vector norm_;
  Linear gate_up_;
  Linear down_;
};

}  // namespace banyan::nn
