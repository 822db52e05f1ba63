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
// what their runs give is added like the products of one network. Where experts are cut in another
// way (MoeOptions::parts) all choose alike too, but each of these ranks sends a run of the tokens
// to the experts, which may be any rank's: what comes back is complete, and the runs are put
// together. Ranks that hold parts of the same experts tell each other the rows that came to them.
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
  // The tokens that this rank brings to the experts, of x [T, ...].
  at::Tensor brought(const at::Tensor& x) const;
  // The gradient of what the layer gave for them, from the rows of the residual stream.
  at::Tensor dy_brought(const at::Tensor& dy, int64_t num_tokens) const;
  // What came of them [t, E], in the rows of the residual stream that are here, of T.
  at::Tensor to_stream(at::Tensor y, int64_t num_tokens) const;
  // True if rows go to other ranks.
  bool sends_rows() const {
    return !parallel::is_alone(moe_.ranks) || !parallel::is_alone(moe_.parts);
  }
  // Experts are not cut as the rest of the layer.
  bool is_apart() const { return moe_.parts != nullptr; }
  parallel::ExpertExchange exchange_of(const std::vector<int64_t>& offsets) const {
    return {*moe_.ranks, offsets, moe_.parts};
  }
  // What a rank without tokens sends: an exchange of nothing, and its rows [0, E].
  parallel::ExpertExchange empty_exchange() const;
  at::Tensor no_rows() const;
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
  MoeOptions moe_;
  const parallel::TensorParallel* tensor_;  // ranks with the same tokens; null: none
  ops::RouterOptions router_;
  Vector norm_;
  Weight gate_;
  std::vector<std::unique_ptr<Weight>> gate_up_;  // one per expert held here
  std::vector<std::unique_ptr<Weight>> down_;
};

}  // namespace banyan::nn
