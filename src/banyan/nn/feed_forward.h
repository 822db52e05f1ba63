// The feed-forward half of a decoder block, y = x + f(N1 x): one network (mlp.h) or experts
// (moe.h).
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/kernels/cpu/decoder_pass.h"
#include "banyan/nn/layer_context.h"

namespace banyan::nn {

class FeedForward {
 public:
  // Kept from forward for backward; the norm output and silu(gate) * up are computed again from
  // these, and so is gate_up where it is missing.
  struct Saved {
    at::Tensor x = {};              // [T, E]
    at::Tensor gate_up = {};        // [T, 2F]; of experts [T k, 2F], sorted by expert
    at::Tensor router_logits = {};  // [T, X], experts only
    at::Tensor choice = {};         // [T, k] int64, experts only
  };

  virtual ~FeedForward() = default;

  // x [T, E] -> [T, E]. With `saved`, keeps what backward needs.
  virtual at::Tensor forward(const LayerContext& context,
                             const at::Tensor& x,
                             Saved* saved) const = 0;

  // dy -> dx; adds the parameters' gradients. Consumes `saved`, of which x alone need be there.
  virtual at::Tensor backward(const LayerContext& context, const at::Tensor& dy, Saved saved) = 0;

  // A pass of other ranks whose rows come here, while this one has none. Nothing where all of the
  // network is on each rank.
  virtual void idle_forward() const {}
  virtual void idle_backward() {}

  // Its weights for the rollout's pass (kernels/cpu/decoder_pass.h), borrowed. Native only, and
  // only of a single network.
  virtual void fill(kernels::PassLayer& layer) const = 0;
};

}  // namespace banyan::nn
