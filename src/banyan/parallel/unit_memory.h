// The memory of a unit's weights and gradients, which comes and goes while the tensors stay: what a
// fully sharded model, and a model that is only filled from one, need of a ParamTable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/core/param.h"

namespace banyan::parallel {

// Storages of some tensors, each once.
class ComingMemory {
 public:
  // The tensors have their memory now, or none of them has.
  explicit ComingMemory(const std::vector<at::Tensor>& tensors);
  bool is_there() const { return is_there_; }
  void take();  // undefined values
  void drop();

 private:
  std::vector<c10::Storage> storages_;
  std::vector<size_t> num_bytes_;
  bool is_there_ = true;
};

// The weights of one unit as one stream of numbers, parameter after parameter.
class UnitWeights {
 public:
  UnitWeights(ParamTable& table, int64_t unit);

  int64_t num_elements() const { return num_elements_; }
  const std::vector<size_t>& params() const { return params_; }
  // True if the model computes with some master of the unit itself.
  bool has_form() const { return has_form_; }

  // Gives the unit its compute forms, and masters where they are forms. `flat` has at least the
  // unit's numbers, in any floating type.
  void fill(const at::Tensor& flat);
  // The same in steps: memory for the masters, whose values somebody brings, then the forms.
  void take();
  void complete();
  // Neither masters nor forms have memory afterwards.
  void drop();
  // The unit's masters, which are there, one after the other.
  at::Tensor flat_masters() const;

 private:
  ParamTable& table_;
  int64_t unit_;
  std::vector<size_t> params_;
  int64_t num_elements_ = 0;
  bool has_form_ = false;
  ComingMemory kept_;     // masters that are forms
  ComingMemory passing_;  // masters that forms are built from
};

}  // namespace banyan::parallel
