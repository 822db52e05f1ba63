#include "banyan/nn/activation_bytes.h"

#include <algorithm>

namespace banyan::nn {

ActivationBytes activation_bytes(const DecoderOptions& shape,
                                 const ComputeOptions& options,
                                 const Recompute& recompute) {
  const auto element = static_cast<int64_t>(c10::elementSize(options.dtype));
  const int64_t wide = options.dtype == at::kDouble ? 8 : 4;
  const int64_t query = shape.heads * shape.head_dim;
  const int64_t qkv = query + 2 * shape.kv_heads * shape.head_dim;
  const int64_t x = shape.hidden * element;
  const int64_t core_attn = query * element + shape.heads * wide;
  const int64_t gate_up = 2 * shape.intermediate * element;
  const int64_t whole_layer = 2 * x + qkv * element + core_attn + gate_up;
  const int64_t dropped_attn = recompute.drops_core_attn() ? core_attn : 0;
  const int64_t dropped_mlp = recompute.drops_mlp() ? gate_up : 0;

  ActivationBytes bytes;
  const int64_t num_whole = shape.layers - recompute.num_in_units(shape.layers);
  bytes.kept = num_whole * (whole_layer - dropped_attn - dropped_mlp) +
               recompute.num_units(shape.layers) * x + x +
               2 * static_cast<int64_t>(sizeof(int32_t));
  const int64_t unit = recompute.largest_unit(shape.layers);
  bytes.again = unit > 0 ? unit * whole_layer - x : std::max(dropped_attn, dropped_mlp);
  // Feed-forward: silu(gate) * up, its gradient and that of gate and up. Attention: rotated q, k,
  // v, their gradients before and after RoPE and as one matrix. Both: the layer's gradient, the
  // norm's output and its gradient, the gradient of the rows.
  bytes.working = std::max(2 * gate_up, (4 * qkv + 2 * query) * element) + 5 * x;
  return bytes;
}

}  // namespace banyan::nn
