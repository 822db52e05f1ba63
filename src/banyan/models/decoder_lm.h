// CausalLM over nn::Decoder: the model of every architecture so far.
#pragma once

#include <memory>
#include <string>

#include "banyan/models/causal_lm.h"
#include "banyan/nn/decoder.h"
#include "banyan/parallel/pipeline_stage.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::models {

// Of the whole decoder; `cuts_experts`: each as the rest of a layer.
parallel::DecoderSizes sizes_of(const nn::DecoderOptions& shape, bool cuts_experts);

class DecoderLM final : public CausalLM {
 public:
  DecoderLM(const std::string& architecture,
            const nn::DecoderOptions& shape,
            const LoadOptions& options);

  const ModelShape& shape() const override { return shape_; }
  const ComputeOptions& options() const override { return options_; }
  ParamTable& params() override { return params_; }
  const parallel::TensorParallel* tensor() const override { return tensor_.get(); }
  const parallel::PipelineStage* stage() const override { return stage_.get(); }
  std::vector<TensorShape> tensors() override;

  at::Tensor forward(const at::Tensor& ids,
                     const at::Tensor& positions,
                     AttentionContext& attention,
                     std::unique_ptr<Saved>* saved) override;
  at::Tensor forward_chunk(int64_t chunk,
                           const at::Tensor& input,
                           const at::Tensor& positions,
                           AttentionContext& attention,
                           std::unique_ptr<Saved>* saved) override;
  void set_recompute(const nn::Recompute& recompute) override {
    decoder_->set_recompute(recompute);
  }
  void set_router_scope(nn::RouterScope* routers) override { decoder_->set_router_scope(routers); }
  parallel::Collectives* expert_ranks() const override { return expert_ranks_; }
  void idle(Pass pass, int64_t chunk) override { decoder_->idle(pass, chunk); }
  nn::ActivationBytes activation_bytes() const override { return decoder_->activation_bytes(); }
  at::Tensor infer(ops::KvPool& pool, const ops::PagedBatch& batch) override;
  void backward(std::unique_ptr<Saved> saved,
                const at::Tensor& grad_hidden,
                AttentionContext& attention) override;
  at::Tensor backward_chunk(int64_t chunk,
                            std::unique_ptr<Saved> saved,
                            const at::Tensor& grad,
                            AttentionContext& attention) override;

  std::vector<UnitUse> unit_uses(Pass pass, int64_t chunk) const override {
    return decoder_->unit_uses(pass, chunk);
  }

  HeadKind head_kind() const override { return head_kind_; }
  const ops::LinearWeight& head() const override { return decoder_->head().compute(); }
  at::Tensor& head_grad() override { return decoder_->head().grad(); }
  const ops::ValueHeadWeight& value_head() const override {
    return decoder_->value_head().compute();
  }
  at::Tensor& value_head_grad() override { return decoder_->value_head().grad_weight(); }
  at::Tensor value_head_bias_grad() const override { return decoder_->value_head().grad_bias(); }

 private:
  ModelShape shape_;
  HeadKind head_kind_;
  ComputeOptions options_;
  parallel::Collectives* expert_ranks_;
  ParamTable params_;
  std::unique_ptr<parallel::TensorParallel> tensor_;  // null: not cut
  std::unique_ptr<parallel::PipelineStage> stage_;    // null: all layers are here
  std::vector<TensorShape> all_tensors_;              // where others hold some; empty: own ones
  std::unique_ptr<nn::Decoder> decoder_;
};

}  // namespace banyan::models
