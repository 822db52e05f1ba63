// The decoder that Llama, Qwen2, Qwen3 and Qwen3-MoE share: embedding, blocks (attention half,
// feed-forward half), final norm, head. The structure is written once, here; DecoderOptions carries
// the differences.
//
// Parameter names are those of HF: model.embed_tokens.weight, model.layers.{i}.*, model.norm.weight
// and, unless tied, lm_head.weight; with a value head, nn/value_head.h instead. Backward walks the
// layers from last to first and frees what a layer saved as soon as that layer is done.
//
// A stage of a pipeline has chunks of the layers (parallel/pipeline_stage.h), under their numbers
// in the whole model; a forward goes through one of them, from token ids or from the rows that the
// stage before it gave. A model without stages is one chunk.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "banyan/core/param_keeper.h"
#include "banyan/nn/activation_bytes.h"
#include "banyan/nn/attention.h"
#include "banyan/nn/feed_forward.h"
#include "banyan/nn/recompute.h"
#include "banyan/nn/value_head.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/parallel/stages.h"

namespace banyan::nn {

class Decoder {
 public:
  // Activations of one forward. Of a layer that is computed again, attention.x alone is there, and
  // only if it is the first of its unit.
  struct Saved {
    struct Layer {
      Attention::Saved attention;
      FeedForward::Saved mlp;
    };
    at::Tensor ids;
    at::Tensor positions;
    std::vector<Layer> layers;
    at::Tensor x;  // input of the final norm, on the last stage; own rows with sequence parallel
    int64_t again_bytes = 0;  // most that the backward computes again and holds at one time
    int64_t bytes() const;
  };

  // Registers all parameters in `table`, which must live as long as the decoder.
  Decoder(ParamTable& table,
          const DecoderOptions& shape,
          const ComputeOptions& options,
          bool with_backward);

  // What forwards with `saved` drop from now on. The bits of forward and gradients do not change.
  void set_recompute(const Recompute& recompute) { recompute_ = recompute; }
  // Over all chunks of this rank.
  ActivationBytes activation_bytes() const;

  // Who counts what the routers choose, and adds their losses, from now on; null: nobody.
  void set_router_scope(RouterScope* routers) { routers_ = routers; }

  // `input` of the chunk: ids [T] int32, or the rows [T, E] behind the chunk before (own rows with
  // sequence parallel), which must not change while `saved` is there. positions [T] int32. Returns
  // hidden [T, E] after the final norm, or rows as those of the input. Without `saved` nothing is
  // kept.
  at::Tensor forward(const at::Tensor& input,
                     const at::Tensor& positions,
                     AttentionContext& attention,
                     Saved* saved,
                     int64_t chunk = 0);

  // One pass of the rollout: the tokens of the batch, their keys and values into the pool, and the
  // hidden rows [num_wanted, E] that are wanted, after the final norm: the bits of forward over a
  // PagedAttention. Native only, without experts. The result is good until the next call; in steady
  // state nothing is allocated.
  at::Tensor infer(ops::KvPool& pool, const ops::PagedBatch& batch);
  bool can_infer() const { return is_native(options_) && shape_.num_moe_layers() == 0; }

  // Units of the parameter table: layer i is unit 1 + i, the rest is the root. Their uses in a
  // pass through a chunk, in order.
  std::vector<UnitUse> unit_uses(Pass pass, int64_t chunk = 0) const;

  // Adds the gradient of every parameter of the chunk, the head's own rows excepted. `grad_hidden`
  // is that of what the forward returned; the input's comes back, undefined for ids. Needs
  // ParamTable::ensure_grads.
  at::Tensor backward(Saved saved,
                      const at::Tensor& grad_hidden,
                      AttentionContext& attention,
                      int64_t chunk = 0);

  // A pass of the ranks that share the experts, through a chunk, while this one has no block for
  // it: takes part in what they exchange. A backward has the forwards in it that set_recompute asks
  // for.
  void idle(Pass pass, int64_t chunk);

  // The vocabulary head, or the value head; asking for the one that is not there is a bug.
  Weight& head();
  ValueHead& value_head();

 private:
  struct Layer {
    Attention attention;
    std::unique_ptr<FeedForward> mlp;
    int64_t number;  // in the whole model
  };
  // Layers that a forward goes through: [first, first + count) of layers_.
  struct Chunk {
    size_t first = 0;
    size_t count = 0;
    bool is_first = true;  // its input are ids
    bool is_last = true;   // the final norm stands behind it
  };
  void add_layers(const parallel::LayerRange& range, bool with_backward);
  ActivationBytes activation_bytes(const Chunk& chunk) const;
  // The i-th layer of a chunk.
  Layer& layer(const Chunk& chunk, int64_t i) const { return *layers_[chunk.first + i]; }
  at::Tensor embed(const at::Tensor& ids) const;
  void embed_backward(const at::Tensor& dx, const at::Tensor& ids);
  // Runs the layers [first, end) of a chunk, a unit, again and fills in what their backward needs.
  // The last one's weights stay for that.
  void run_again(
      const Chunk& chunk, int64_t first, int64_t end, Saved& saved, AttentionContext& attention);

  ParamTable& table_;
  DecoderOptions shape_;
  ComputeOptions options_;
  Recompute recompute_;
  RouterScope* routers_ = nullptr;
  RopeTable rope_;
  std::vector<Chunk> chunks_;
  std::unique_ptr<Weight> embedding_;  // null where neither ids nor a tied head need it
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Vector> norm_;           // null but on the last stage, and so the next two
  std::unique_ptr<Weight> head_;           // null if tied, or with a value head
  std::unique_ptr<ValueHead> value_head_;  // null with a vocabulary head

  // Of infer.
  kernels::PassModel pass_;
  kernels::PassWorkspace workspace_;
  at::Tensor hidden_;  // [most rows wanted so far, E]
  at::Tensor wanted_;  // its first rows, as last returned
};

}  // namespace banyan::nn
