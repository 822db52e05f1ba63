// CausalLM: what training and rollout see of a model. All supported decoders share one block
// structure (nn/decoder.h); an architecture file (llama.cpp, qwen2.cpp, qwen3.cpp, qwen3_moe.cpp)
// reads its config.json and chooses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/core/device.h"
#include "banyan/core/param.h"
#include "banyan/nn/activation_bytes.h"
#include "banyan/nn/router_scope.h"
#include "banyan/ops/linear.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/ops/value_head.h"
#include "banyan/parallel/stages.h"

namespace banyan::parallel {
class Collectives;
class PipelineStage;
class TensorParallel;
}  // namespace banyan::parallel

namespace banyan::models {

using nn::HeadKind;

// Sizes that others need.
struct ModelShape {
  std::string architecture;  // "llama", "qwen2", "qwen3", "qwen3_moe"
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t max_positions = 0;
  bool tied = false;
  // Mixture of experts: how many layers have it, and their sizes; `intermediate` is that of the
  // other layers.
  int64_t moe_layers = 0;
  int64_t num_experts = 0;
  int64_t experts_per_token = 0;
  int64_t moe_intermediate = 0;

  // Columns of gate (or up) that a token is multiplied with, summed over the layers.
  int64_t active_columns() const {
    return (layers - moe_layers) * intermediate + moe_layers * experts_per_token * moe_intermediate;
  }
};

// A tensor of a model's files.
struct TensorShape {
  std::string name;
  std::vector<int64_t> shape;
};

// Activations that one forward saved for its backward; belongs to one block of the plan.
class Saved {
 public:
  virtual ~Saved() = default;
  virtual int64_t bytes() const = 0;
  // Most of these at one time during the backward, with what it computes again.
  virtual int64_t backward_bytes() const { return bytes(); }
};

class CausalLM {
 public:
  virtual ~CausalLM() = default;

  virtual const ModelShape& shape() const = 0;
  virtual const ComputeOptions& options() const = 0;
  virtual ParamTable& params() = 0;
  // Where each layer lies in parts on several ranks: these, which run every forward and backward
  // together. Null: all of it is here.
  virtual const parallel::TensorParallel* tensor() const { return nullptr; }
  // Which stages of a pipeline are here; null: all layers are, in one chunk.
  virtual const parallel::PipelineStage* stage() const { return nullptr; }
  // All tensors of the model, whoever holds them, in the order of a whole model's table.
  virtual std::vector<TensorShape> tensors();

  // ids, positions [T] int32 on the model's device -> hidden [T, E] after the final norm, compute
  // dtype. With `saved`, fills it for backward (one object per forward).
  virtual at::Tensor forward(const at::Tensor& ids,
                             const at::Tensor& positions,
                             AttentionContext& attention,
                             std::unique_ptr<Saved>* saved) = 0;

  // One chunk of a model in stages: `input` are ids [T] on the first stage, the rows behind the
  // stage before on the others; hidden [T, E] after the final norm comes out of the last, else rows
  // for the next. The same as forward for a model without stages.
  virtual at::Tensor forward_chunk(int64_t /*chunk*/,
                                   const at::Tensor& input,
                                   const at::Tensor& positions,
                                   AttentionContext& attention,
                                   std::unique_ptr<Saved>* saved) {
    return forward(input, positions, attention, saved);
  }

  // What forwards with `saved` drop and their backward computes again (nn/recompute.h). Changes no
  // bit of any result.
  virtual void set_recompute(const nn::Recompute& /*recompute*/) {}
  // What one token of a block takes, under that; zeros where nobody knows.
  virtual nn::ActivationBytes activation_bytes() const { return {}; }

  // Who counts what the routers of the model choose, and adds their losses to gradients, from now
  // on; borrowed; null: nobody. Nothing without experts.
  virtual void set_router_scope(nn::RouterScope* /*routers*/) {}

  // Ranks that share the experts of this model, each of which takes part in every pass; null: all
  // of it is here. `idle` is a pass of others, for which this rank has no block.
  virtual parallel::Collectives* expert_ranks() const { return nullptr; }
  virtual void idle(Pass /*pass*/, int64_t /*chunk*/) {}

  // One pass of the rollout: writes the keys and values of the batch's tokens into the pool and
  // returns the hidden rows [num_wanted, E] that are wanted, after the final norm. The bits of
  // forward over an ops::PagedAttention, which is also what this does unless a model has a faster
  // way. Good until the next call. The batch is finished for this pool and vocabulary.
  virtual at::Tensor infer(ops::KvPool& pool, const ops::PagedBatch& batch);

  // grad_hidden [T, E] of the same forward -> adds every parameter's gradient (head excepted: it is
  // added by ops::edge_logprob_backward or ops::value_head_backward). Consumes `saved`.
  virtual void backward(std::unique_ptr<Saved> saved,
                        const at::Tensor& grad_hidden,
                        AttentionContext& attention) = 0;
  // Of forward_chunk. Returns the gradient of its input, undefined on the first stage.
  virtual at::Tensor backward_chunk(int64_t /*chunk*/,
                                    std::unique_ptr<Saved> saved,
                                    const at::Tensor& grad,
                                    AttentionContext& attention) {
    backward(std::move(saved), grad, attention);
    return {};
  }

  // Units of params() that a forward or backward of a chunk of this model uses, in order
  // (core/param_keeper.h).
  virtual std::vector<UnitUse> unit_uses(Pass /*pass*/, int64_t /*chunk*/ = 0) const { return {}; }

  // One of the two heads is there, on the last stage; gradients after params().ensure_grads().
  virtual HeadKind head_kind() const = 0;
  virtual const ops::LinearWeight& head() const = 0;  // [V, E]; the embedding if tied
  virtual at::Tensor& head_grad() = 0;                // [V, E]
  virtual const ops::ValueHeadWeight& value_head() const = 0;
  virtual at::Tensor& value_head_grad() = 0;            // [1, E]
  virtual at::Tensor value_head_bias_grad() const = 0;  // [1], undefined without a bias
};

struct LoadOptions {
  ComputeOptions compute;
  bool with_backward = true;  // also keep what backward needs (packed transposes)
  // kValue reads score.weight and score.bias (HF's ...ForTokenClassification or
  // ...ForSequenceClassification with one label) in place of the vocabulary head. A directory
  // without them, such as a causal model, gets normal(0, initializer_range) from `head_seed` and a
  // zero bias (none without `head_bias`), and a line in `notes`.
  HeadKind head = HeadKind::kVocabulary;
  uint64_t head_seed = 0;
  bool head_bias = true;
  // Ranks over which each layer is cut (parallel/tensor_parallel.h); borrowed. Null: none.
  parallel::Collectives* tensor = nullptr;
  bool sequence_parallel = false;
  // Ranks over which the layers are dealt out in stages, first and last of them, and how
  // (parallel/stages.h); borrowed. Null: none.
  parallel::Collectives* pipeline = nullptr;
  parallel::Collectives* embedding = nullptr;
  parallel::StageSplit split = {};
  std::vector<std::string>* notes = nullptr;
  bool router_in_double = false;  // logits and probabilities of routers in fp64
  // Ranks over which the experts are dealt out (parallel/expert_exchange.h); borrowed. Null: none.
  parallel::Collectives* experts = nullptr;
  // Where experts are not cut as the rest of a layer is: the ranks that hold the other parts of the
  // same ones, which may be this one alone, and those that hold all experts together. Null: they
  // are cut over `tensor`.
  parallel::Collectives* expert_tensor = nullptr;
  parallel::Collectives* expert_model = nullptr;
  // False: parameters have neither memory nor values, which others bring (parallel/unit_memory.h).
  bool with_values = true;
  // Called with the model before its values are read, one after the other: makes a keeper for its
  // parameters, which are empty. Null: they are whole.
  std::function<void(CausalLM&)> before_values = nullptr;
};

// Loads an HF directory: config.json and safetensors (sharded or not). Throws FileError naming
// file, tensor and reason; a missing or unexpected tensor name is an error that lists them all.
std::unique_ptr<CausalLM> load_model(const std::string& directory, const LoadOptions& options);

// Ranks over which a model is cut.
struct CutSizes {
  int64_t tensor = 1;
  int64_t experts = 1;
  std::optional<int64_t> expert_tensor = {};  // null: experts are cut as the rest of a layer
};

// Throws [config] naming the actor's key of a size that the model in `directory` cannot be cut by,
// as loading its parts would. Reads config.json alone.
void check_cut(const std::string& directory, const CutSizes& sizes);

// A model of the given config.json text with normal(0, initializer_range) weights, for tests and
// `doctor`.
std::unique_ptr<CausalLM> random_model(const std::string& config_json,
                                       uint64_t seed,
                                       const LoadOptions& options);

// Writes config.json (copied from `config_from`, an HF directory, with dtype set), safetensors
// shards in `dtype` and the tokenizer files found there. A model with a value head becomes HF's
// ...ForTokenClassification, or ...ForSequenceClassification if it has no bias. `directory` must
// not exist yet. `weights` are all tensors, whole, of a model that holds parts of them; null: its
// masters.
void save_model(CausalLM& model,
                const std::string& config_from,
                const std::string& directory,
                at::ScalarType dtype,
                const std::map<std::string, at::Tensor>* weights = nullptr);

}  // namespace banyan::models
