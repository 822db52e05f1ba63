// The feed-forward half of a decoder block: y = x + down(silu(gate h) * up h), h = N1 x. gate and
// up are one projection.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "banyan/nn/decoder_options.h"
#include "banyan/nn/linear.h"

namespace banyan::nn {

class Mlp {
 public:
  // Kept from forward for backward; the norm output and silu(gate) * up are computed again from
  // these, and so is gate_up where it is missing.
  struct Saved {
    at::Tensor x;        // [T, E]
    at::Tensor gate_up;  // [T, 2F]
  };

  // `prefix`: "model.layers.0." The parameters are post_attention_layernorm and mlp.*.
  Mlp(ParamTable& table,
      const std::string& prefix,
      const DecoderOptions& shape,
      const ComputeOptions& options,
      bool with_backward);

  // x [T, E] -> [T, E]. With `saved`, keeps what backward needs.
  at::Tensor forward(const at::Tensor& x, Saved* saved) const;

  // Its weights for the rollout's pass (kernels/cpu/decoder_pass.h), borrowed. Native only.
  void fill(kernels::PassLayer& layer) const;

  // dy -> dx; adds the parameters' gradients. Consumes `saved`.
  at::Tensor backward(const at::Tensor& dy, Saved saved);

 private:
  ComputeOptions options_;
  double norm_eps_;
  Vector norm_;
  Linear gate_up_;
  Linear down_;
};

}  // namespace banyan::nn
