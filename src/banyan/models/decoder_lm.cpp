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
      sizes_of(shape, /*cuts_experts=*/shape.moe.parts == nullptr));
}

std::unique_ptr<parallel::PipelineStage> stage_of(const nn::DecoderOptions& shape,
                                                  const LoadOptions& options) {
  if (parallel::is_alone(options.pipeline)) return nullptr;
  BANYAN_ASSERT(options.embedding != nullptr, "stages without the group of first and last");
  return std::make_unique<parallel::PipelineStage>(
      *options.pipeline, *options.embedding, shape.layers, options.split);
}

// Names and shapes of the whole model, built without memory.
std::vector<TensorShape> outline(const std::string& architecture, nn::DecoderOptions shape) {
  shape.moe.ranks = shape.moe.parts = nullptr;
  const LoadOptions options{
      .compute = {.dtype = at::kFloat, .device = at::kMeta, .kernels = Kernels::kAten},
      .with_backward = false};
  return DecoderLM(architecture, shape, options).tensors();
}

// What this rank holds of it.
nn::DecoderOptions part_of(nn::DecoderOptions shape,
                           const parallel::TensorParallel* tensor,
                           const parallel::PipelineStage* stage) {
  shape.stage = stage;
  nn::MoeOptions& moe = shape.moe;
  if (moe.parts != nullptr) {
    moe.whole_intermediate = moe.intermediate;
    const parallel::Part run =
        parallel::even_part(moe.intermediate, moe.parts->size(), moe.parts->rank());
    moe.first_intermediate = run.begin;
    moe.intermediate = run.count;
  } else if (tensor != nullptr) {
    moe.intermediate = tensor->expert_intermediate().count;
  }
  if (tensor == nullptr) return shape;
  shape.heads = tensor->heads().count;
  shape.kv_heads = tensor->kv_heads().count;
  shape.intermediate = tensor->intermediate().count;
  shape.vocab = tensor->vocab().count;
  shape.tensor = tensor;
  return shape;
}

// Ranks that go through every pass together.
parallel::Collectives* ranks_in_step(const nn::DecoderOptions& shape, const LoadOptions& options) {
  parallel::Collectives* ranks =
      shape.moe.parts != nullptr ? options.expert_model : shape.moe.ranks;
  return parallel::is_alone(ranks) ? nullptr : ranks;
}

}  // namespace

parallel::DecoderSizes sizes_of(const nn::DecoderOptions& shape, bool cuts_experts) {
  return {.heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .intermediate = shape.intermediate,
          .expert_intermediate = cuts_experts ? shape.moe.intermediate : 0,
          .vocab = shape.vocab};
}

DecoderLM::DecoderLM(const std::string& architecture,
                     const nn::DecoderOptions& shape,
                     const LoadOptions& options)
    : shape_(shape_of(architecture, shape)),
      head_kind_(shape.head),
      options_(options.compute),
      expert_ranks_(ranks_in_step(shape, options)),
      params_(/*masters_are_empty=*/!options.with_values || options.before_values != nullptr),
      tensor_(cut_of(shape, options)),
      stage_(stage_of(shape, options)),
      decoder_(std::make_unique<nn::Decoder>(params_,
                                             part_of(shape, tensor_.get(), stage_.get()),
                                             options.compute,
                                             options.with_backward)) {
  if (tensor_) tensor_->declare(params_);
  if (stage_ || expert_ranks_ != nullptr) all_tensors_ = outline(architecture, shape);
  if (stage_ && shape.tied && head_kind_ == HeadKind::kVocabulary) {
    stage_->share_embedding(params_, "model.embed_tokens.weight");
  }
}

std::vector<TensorShape> DecoderLM::tensors() {
  return all_tensors_.empty() ? CausalLM::tensors() : all_tensors_;
}

at::Tensor DecoderLM::forward(const at::Tensor& ids,
                              const at::Tensor& positions,
                              AttentionContext& attention,
                              std::unique_ptr<Saved>* saved) {
  BANYAN_ASSERT(!stage_, "forward of a model in stages: a chunk at a time");
  return forward_chunk(/*chunk=*/0, ids, positions, attention, saved);
}

at::Tensor DecoderLM::forward_chunk(int64_t chunk,
                                    const at::Tensor& input,
                                    const at::Tensor& positions,
                                    AttentionContext& attention,
                                    std::unique_ptr<Saved>* saved) {
  if (!saved) return decoder_->forward(input, positions, attention, nullptr, chunk);
  auto kept = std::make_unique<DecoderSaved>();
  at::Tensor hidden = decoder_->forward(input, positions, attention, &kept->activations, chunk);
  *saved = std::move(kept);
  return hidden;
}

at::Tensor DecoderLM::infer(ops::KvPool& pool, const ops::PagedBatch& batch) {
  // The native pass has its own code for every op of the body: not where a slot is changed, nor
  // where ranks add their terms between the products.
  const bool fused = !tensor_ && decoder_->can_infer() && !ops::is_body_changed();
  return fused ? decoder_->infer(pool, batch) : CausalLM::infer(pool, batch);
}

void DecoderLM::backward(std::unique_ptr<Saved> saved,
                         const at::Tensor& grad_hidden,
                         AttentionContext& attention) {
  backward_chunk(/*chunk=*/0, std::move(saved), grad_hidden, attention);
}

at::Tensor DecoderLM::backward_chunk(int64_t chunk,
                                     std::unique_ptr<Saved> saved,
                                     const at::Tensor& grad,
                                     AttentionContext& attention) {
  auto* kept = dynamic_cast<DecoderSaved*>(saved.get());
  BANYAN_ASSERT(kept, "backward needs what the forward of the same model saved");
  return decoder_->backward(std::move(kept->activations), grad, attention, chunk);
}

}  // namespace banyan::models
