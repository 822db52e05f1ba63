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

}  // namespace

DecoderLM::DecoderLM(const std::string& architecture,
                     const nn::DecoderOptions& shape,
                     const LoadOptions& options)
    : shape_(shape_of(architecture, shape)),
      head_kind_(shape.head),
      options_(options.compute),
      expert_ranks_(parallel::is_alone(shape.moe.ranks) ? nullptr : shape.moe.ranks),
      decoder_(
          std::make_unique<nn::Decoder>(params_, shape, options.compute, options.with_backward)) {}

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
