// Activation recompute: what a forward drops and the backward computes again, with the same bits.
// The words are Megatron's (recompute_granularity, _method, _num_layers, _modules).
//
//   full, uniform  the layers in units of num_layers (the last may be shorter); a unit keeps its
//                  input [T, E] only, and its forward runs again in front of its backward
//   full, block    the first num_layers layers, each a unit of its own; the others keep everything
//   selective      parts of every layer: core_attn (attention's output and lse are computed again
//                  from q, k and v) and mlp (gate and up again from the layer's second input), in
//                  layers with experts moe (gate and up of the chosen experts, likewise)
//
// Norm outputs, rotated queries and keys, and silu(gate) * up are never kept.
#pragma once

#include <algorithm>
#include <cstdint>

namespace banyan::nn {

enum class RecomputeMethod : uint8_t { kNone, kUniform, kBlock, kSelective };

struct Recompute {
  RecomputeMethod method = RecomputeMethod::kNone;
  int64_t num_layers = 1;  // kUniform, kBlock: >= 1
  bool core_attn = false;  // kSelective
  bool mlp = false;        // kSelective
  bool moe = false;        // kSelective

  // First layer of the unit that `layer` belongs to; -1 for a layer that is no part of a unit.
  int64_t unit_of(int64_t layer) const {
    if (method == RecomputeMethod::kUniform) return layer - layer % num_layers;
    return method == RecomputeMethod::kBlock && layer < num_layers ? layer : -1;
  }

  // Layers of the largest unit of a model; 0: there is none.
  int64_t largest_unit(int64_t layers) const {
    if (method == RecomputeMethod::kUniform) return std::min(num_layers, layers);
    return method == RecomputeMethod::kBlock ? std::min<int64_t>(1, layers) : 0;
  }

  // Layers that keep the input of a unit and nothing else, and those that belong to a unit.
  int64_t num_units(int64_t layers) const {
    if (method == RecomputeMethod::kUniform) return (layers + num_layers - 1) / num_layers;
    return method == RecomputeMethod::kBlock ? std::min(num_layers, layers) : 0;
  }
  int64_t num_in_units(int64_t layers) const {
    return method == RecomputeMethod::kUniform ? layers : num_units(layers);
  }

  bool drops_core_attn() const { return method == RecomputeMethod::kSelective && core_attn; }
  // Gate and up of a layer's feed-forward half.
  bool drops_gate_up(bool has_experts) const {
    return method == RecomputeMethod::kSelective && (has_experts ? moe : mlp);
  }
};

}  // namespace banyan::nn
