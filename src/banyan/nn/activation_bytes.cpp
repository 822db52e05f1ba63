#include "banyan/nn/activation_bytes.h"

#include <algorithm>

#include "banyan/parallel/tensor_parallel.h"

namespace banyan::nn {
namespace {

// Bytes per token of one layer's activations, part by part.
struct LayerBytes {
  int64_t attention = 0;  // x and q, k, v
  int64_t core_attn = 0;  // output and lse
  int64_t x = 0;          // of the feed-forward half
  int64_t gate_up = 0;
  int64_t routing = 0;  // logits and choices
  int64_t working = 0;  // most that its backward holds beside these

  int64_t whole() const { return attention + core_attn + x + gate_up + routing; }
};

// With sequence parallel a rank keeps its rows of what stands between the products.
int64_t kept_rows_bytes(const DecoderOptions& shape, int64_t bytes) {
  const bool shares_rows = shape.tensor != nullptr && shape.tensor->is_sequence_parallel();
  const int64_t num_ranks = shares_rows ? shape.tensor->ranks().size() : 1;
  return (bytes + num_ranks - 1) / num_ranks;
}

LayerBytes layer_bytes(const DecoderOptions& shape, const ComputeOptions& options, int64_t layer) {
  const auto element = static_cast<int64_t>(c10::elementSize(options.dtype));
  const int64_t wide = options.dtype == at::kDouble ? 8 : 4;
  const int64_t query = shape.heads * shape.head_dim;
  const int64_t qkv = query + 2 * shape.kv_heads * shape.head_dim;
  const int64_t x = shape.hidden * element;
  const int64_t kept_x = kept_rows_bytes(shape, x);
  LayerBytes bytes;
  bytes.attention = kept_x + qkv * element;
  bytes.core_attn = query * element + shape.heads * wide;
  bytes.x = kept_x;
  int64_t feed_forward = 0;
  if (shape.moe.has_experts(layer)) {
    const MoeOptions& moe = shape.moe;
    const int64_t logit = moe.router_in_double ? 8 : wide;
    bytes.gate_up = moe.num_chosen * 2 * moe.intermediate * element;
    bytes.routing =
        moe.num_experts * logit + moe.num_chosen * static_cast<int64_t>(sizeof(int64_t));
    // Rows of the experts: dy, d(act) twice, act twice, d(gate, up); h and d(h) of the rows.
    feed_forward = 3 * bytes.gate_up + 2 * moe.num_chosen * x + 4 * bytes.routing;
    if (!parallel::is_alone(moe.ranks) || moe.parts != nullptr) {  // rows are sent again, not kept
      feed_forward += bytes.gate_up + 2 * moe.num_chosen * x;
      bytes.gate_up = 0;
    }
  } else {
    bytes.gate_up = 2 * shape.intermediate * element;
    feed_forward = 2 * bytes.gate_up;
  }
  // Feed-forward: silu(gate) * up, its gradient and that of gate and up. Attention: rotated q, k,
  // v, their gradients before and after RoPE and as one matrix. Both: the layer's gradient, the
  // norm's output and its gradient, the gradient of the rows.
  bytes.working = std::max(feed_forward, (4 * qkv + 2 * query) * element) + 5 * x;
  return bytes;
}

}  // namespace

int64_t kept_row_bytes(const DecoderOptions& shape, const ComputeOptions& options) {
  return kept_rows_bytes(shape,
                         shape.hidden * static_cast<int64_t>(c10::elementSize(options.dtype)));
}

ActivationBytes activation_bytes(const DecoderOptions& shape,
                                 const ComputeOptions& options,
                                 const Recompute& recompute,
                                 int64_t first) {
  const int64_t x = kept_row_bytes(shape, options);
  ActivationBytes bytes;
  bytes.kept =
      recompute.num_units(shape.layers) * x + x + 2 * static_cast<int64_t>(sizeof(int32_t));
  int64_t unit = -1;
  int64_t unit_bytes = 0;  // of the layers of `unit` so far, its input apart
  for (int64_t i = 0; i < shape.layers; ++i) {
    const LayerBytes layer = layer_bytes(shape, options, first + i);
    bytes.working = std::max(bytes.working, layer.working);
    if (recompute.unit_of(i) >= 0) {
      unit_bytes = (recompute.unit_of(i) == unit ? unit_bytes : -x) + layer.whole();
      unit = recompute.unit_of(i);
      bytes.again = std::max(bytes.again, unit_bytes);
      continue;
    }
    const int64_t dropped_attn = recompute.drops_core_attn() ? layer.core_attn : 0;
    const int64_t dropped_mlp =
        recompute.drops_gate_up(shape.moe.has_experts(first + i)) ? layer.gate_up : 0;
    bytes.kept += layer.whole() - dropped_attn - dropped_mlp;
    bytes.again = std::max({bytes.again, dropped_attn, dropped_mlp});
  }
  return bytes;
}

}  // namespace banyan::nn
