// The feed-forward half of a decoder block with experts (parallel specification section 7),
// dropless:
//   h = N1 x;   choice, w = router(h);   y = x + sum over c of w_c expert_{choice_c}(h)
//   expert(h) = down(silu(gate h) * up h)
// Rows (token, choice) are sorted by expert, multiplied group by group and brought back; a token's
// sum goes over its choices, the most probable first. So the bits of a token do not depend on the
// others (native kernels).
//
// The weight w stands behind `down` in the forward. In the backward it is moved before it, so that
// the experts' outputs need not be kept: with g = dy Wdown, dw = g · act, d(act) = w g and
// dWdown = dyᵀ (w act).
//
// Experts may be dealt out over ranks (parallel/expert_exchange.h): then a rank holds its own
// alone, rows go to them and what they give comes back to where the row was, so a token's sum has
// the bits of one process. Nothing is kept of the rows that came: the backward sends them once
// more, so it does not matter in which order the ranks' backwards follow each other.
//
// Over ranks of tensor parallel each holds a run of every expert's columns F; all choose alike, and
// what their runs give is added like the products of one network.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "banyan/nn/decoder_options.h"
#include "banyan/nn/feed_forward.h"
#include "banyan/nn/weight.h"
#include "banyan/ops/expert_rows.h"
#include "banyan/ops/grouped_linear.h"
#include "banyan/parallel/expert_exchange.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::nn {

class Moe final : public FeedForward {
 public:
  // `prefix`: "model.layers.0." The parameters are post_attention_layernorm, mlp.gate and
  // mlp.experts.{e}.{gate,up,down}_proj.
  Moe(ParamTable& table,
      const std::string& prefix,
      const DecoderOptions& shape,
      const ComputeOptions& options,
      bool with_backward);

  at::Tensor forward(const LayerContext& context, const at::Tensor& x, Saved* saved) const override;
  void fill(kernels::PassLayer& layer) const override;
  at::Tensor backward(const LayerContext& context, const at::Tensor& dy, Saved saved) override;
  void idle_forward() const override;
  void idle_backward() override;

 private:
  // All rows of N1 x.
  at::Tensor normed(const LayerContext& context, const at::Tensor& x) const;
  ops::ExpertWeights compute_of(const std::vector<std::unique_ptr<Weight>>& weights) const;

  // Rows [R, E] of the experts held here, sorted by expert, through them; `gate_up` is left there
  // if it is not null.
  at::Tensor experts_forward(const at::Tensor& h,
                             const std::vector<int64_t>& offsets,
                             at::Tensor* gate_up) const;
  // Back through them; gate_up is made again where it is undefined.
  struct RowGradients {
    at::Tensor h;       // [R, E]
    at::Tensor weight;  // [R] fp32 (fp64)
  };
  struct Rows {
    at::Tensor h;       // [R, E]
    at::Tensor dy;      // [R, E]
    at::Tensor weight;  // [R]
  };
  RowGradients experts_backward(const Rows& rows,
                                const std::vector<int64_t>& offsets,
                                at::Tensor gate_up);

  ComputeOptions options_;
  double norm_eps_;
  int64_t num_experts_;
  parallel::Collectives* ranks_;            // that hold the other experts; null: all are here
  const parallel::TensorParallel* tensor_;  // ranks that hold the rest of each; null: none
  ops::RouterOptions router_;
  Vector norm_;
  Weight gate_;
  std::vector<std::unique_ptr<Weight>> gate_up_;  // one per expert held here
  std::vector<std::unique_ptr<Weight>> down_;
};

}  // namespace banyan::nn
