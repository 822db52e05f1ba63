#include "banyan/models/decoder_lm.h"

#include "banyan/core/error.h"
#include "banyan/ops/slots.h"

namespace banyan::models {
namespace {

struct DecoderSaved final : Saved {
  int64_t bytes() const override { return activations.bytes(); }
  int64_t backward_bytes() const override { return activations.bytes() + activations.again_bytes; }
  nn::Decoder::Saved activations;
};

ModelShape shape_of(const std::string& architecture, const nn::DecoderOptions& options) {
  return {.architecture = architecture,
          .vocab = options.vocab,
          .hidden = options.hidden,
          .layers = options.layers,
          .heads = options.heads,
          .kv_heads = options.kv_heads,
          .head_dim = options.head_dim,
          .intermediate = options.intermediate,
          .max_positions = options.max_positions,
          .tied = options.tied,
          .moe_layers = options.num_moe_layers(),
          .num_experts = options.moe.num_experts,
          .experts_per_token = options.moe.num_chosen,
          .moe_intermediate = options.moe.intermediate};
}

std::unique_ptr<parallel::TensorParallel> cut_of(const nn::DecoderOptions& shape,
                                                 const LoadOptions& options) {
  if (parallel::is_alone(options.tensor)) return nullptr;
  return std::make_unique<parallel::TensorParallel>(
      *options.tensor,
      options.sequence_parallel,
      parallel::DecoderSizes{.heads = shape.heads,
                             .kv_heads = shape.kv_heads,
                             .head_dim = shape.head_dim,
                             .intermediate = shape.intermediate,
                             .expert_intermediate = shape.moe.intermediate,
                             .vocab = shape.vocab});
}

// What this rank holds of it.
nn::DecoderOptions part_of(nn::DecoderOptions shape, const parallel::TensorParallel* tensor) {
  if (tensor == nullptr) return shape;
  shape.heads = tensor->heads().count;
  shape.kv_heads = tensor->kv_heads().count;
  shape.intermediate = tensor->intermediate().count;
  shape.moe.intermediate = tensor->expert_intermediate().count;
  shape.vocab = tensor->vocab().count;
  shape.tensor = tensor;
  return shape;
}

}  // namespace

DecoderLM::DecoderLM(const std::string& architecture,
                     const nn::DecoderOptions& shape,
                     const LoadOptions& options)
    : shape_(shape_of(architecture, shape)),
      head_kind_(shape.head),
      options_(options.compute),
      expert_ranks_(parallel::is_alone(shape.moe.ranks) ? nullptr : shape.moe.ranks),
      params_(/*masters_are_empty=*/!options.with_values || options.before_values != nullptr),
      tensor_(cut_of(shape, options)),
      decoder_(std::make_unique<nn::Decoder>(
          params_, part_of(shape, tensor_.get()), options.compute, options.with_backward)) {
  if (tensor_) tensor_->declare(params_);
}

at::Tensor DecoderLM::forward(const at::Tensor& ids,
                              const at::Tensor& positions,
                              AttentionContext& attention,
                              std::unique_ptr<Saved>* saved) {
  if (!saved) return decoder_->forward(ids, positions, attention, nullptr);
  auto kept = std::make_unique<DecoderSaved>();
  at::Tensor hidden = decoder_->forward(ids, positions, attention, &kept->activations);
  *saved = std::move(kept);
  return hidden;
}

at::Tensor DecoderLM::infer(ops::KvPool& pool, const ops::PagedBatch& batch) {
  // The native pass has its own code for every op of the body: not where a slot is changed.
  const bool fused = decoder_->can_infer() && !ops::is_body_changed();
  return fused ? decoder_->infer(pool, batch) : CausalLM::infer(pool, batch);
}

void DecoderLM::backward(std::unique_ptr<Saved> saved,
                         const at::Tensor& grad_hidden,
                         AttentionContext& attention) {
  auto* kept = dynamic_cast<DecoderSaved*>(saved.get());
  BANYAN_ASSERT(kept, "backward needs what the forward of the same model saved");
  decoder_->backward(std::move(kept->activations), grad_hidden, attention);
}

}  // namespace banyan::models
