// The whole tensors of a model whose parameters lie in parts on several ranks, one after the other:
// what the rollout's model, checkpoints and exports are filled from, whatever the cut. Parts of a
// tensor are brought together over the tensor group of the stage that has it; then the stage tells
// it to the others. Of experts that are dealt out their holders do so before, whose parts may lie
// over other ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/parallel/groups.h"

namespace banyan::parallel {

class WeightView {
 public:
  // (all) Both are borrowed; the ranks tell each other their cuts.
  WeightView(const ParamTable& params, Groups& groups);

  // `whole` has the bits of the parts. It is the master itself where that is whole.
  using Visit = std::function<void(const std::string& name, const at::Tensor& whole)>;
  // (all) Masters by their HF names, each once, in the order of the tables of one stage after the
  // other; the experts of a layer come together, whoever holds them, so that who fills a model is
  // done with a layer before the next.
  void each(const Visit& visit) const;
  // (all) Tensors that lie as the masters do, one per parameter: gradients, moments.
  void each_of(const std::vector<at::Tensor>& own, const Visit& visit) const;

 private:
  // Runs of one parameter along its cut, by rank of the group over which it lies.
  struct Places {
    std::vector<int64_t> begin;
    std::vector<int64_t> count;
    int64_t longest = 0;
  };
  // A tensor of the model, on the stage that tells it.
  struct Whole {
    std::string name;
    int64_t stage = 0;
    int64_t unit = 0;
    int64_t holder = -1;  // rank of the expert group; -1: all of them
    int64_t param = 0;    // in that rank's table
    std::vector<int64_t> shape;
    at::ScalarType dtype = at::kFloat;
    size_t place = 0;  // that of the first expert of the layer for an expert
  };
  // (all) Fills places_ of the parameters that lie in parts over these ranks.
  void place(Collectives& ranks, bool dealt);
  // Over which those of a parameter lie.
  Collectives& ranks_of(size_t i) const;
  void list();
  void bring_experts_together();
  at::Tensor gathered(size_t i, const at::Tensor& own) const;

  const ParamTable& params_;
  Groups& groups_;
  std::vector<Places> places_;  // per parameter; empty where it is whole
  std::vector<Whole> all_;
};

}  // namespace banyan::parallel
