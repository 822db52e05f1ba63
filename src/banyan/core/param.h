// ParamTable: what the optimizer, the checkpoint and (later) the parallel layers see of a model. A
// parameter is a named fp32 master with a gradient buffer; the compute form (packed bf16, plain
// copy, ...) belongs to the layer that reads it, which registers `repack` to rebuild it from the
// master, and what else is derived from weights does likewise: a change of the weights is followed
// by one repack() and then nothing old is left.
//
// Memory can be given back while a model is not used: the forms alone (they are built again from
// the masters), or masters too (somebody brings their values again).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "banyan/core/param_keeper.h"

namespace banyan {

// Where a master lies in the tensor that the HF file holds under its name: numbers
// [begin, begin + master.size(dim)) of `whole` along `dim`. Over several ranks each may hold a
// part.
struct Cut {
  int64_t dim = -1;  // -1: the master is the whole tensor
  int64_t begin = 0;
  int64_t whole = 0;

  bool is_whole() const { return dim < 0; }
  // The shape in the file of a master of this shape.
  std::vector<int64_t> whole_shape(at::IntArrayRef own) const;
  // The part of the whole tensor that a master of `size` along dim holds, as a view.
  at::Tensor part_of(const at::Tensor& tensor, int64_t size) const;
};

struct Param {
  std::string name;  // HF name on disk: "model.layers.0.self_attn.q_proj.weight"
  at::Tensor
      master;  // fp32 (fp64 for a fp64 model), contiguous; may be a row range of a fused matrix
  at::Tensor grad;  // same shape and dtype, or undefined until ensure_grads(); gradients are added
                    // in place
  Cut cut = {};
  // Of an expert that other ranks do not hold: its gradient is added over those that do.
  bool is_dealt = false;
  // Another rank of this copy of the model holds these numbers too and counts them in the norm.
  bool is_copy = false;
  int64_t unit = 0;  // weights that are used together (ParamTable::set_unit)
  // The model computes with the master itself; who builds a form of its own says otherwise.
  bool is_form = true;
};

class ParamTable {
 public:
  // `masters_are_empty`: masters get shapes and no memory, since others bring them (a keeper, or
  // parallel/unit_memory.h).
  explicit ParamTable(bool masters_are_empty = false) : masters_are_empty_(masters_are_empty) {}
  bool masters_are_empty() const { return masters_are_empty_; }

  // Adds a parameter; throws [banyan bug] on a duplicate name. The index is stable.
  int64_t add(std::string name, at::Tensor master, Cut cut = {});
  // Registers the function that rebuilds one compute form after masters changed and, if the form
  // has memory of its own, the one that shows the tensors that it is made of.
  using EachTensor = std::function<void(const std::function<void(at::Tensor&)>& visit)>;
  void on_repack(std::function<void()> repack, EachTensor tensors = nullptr);
  // Registers the function that lends a gradient buffer to one or more params (fused matrices).
  void on_ensure_grads(std::function<void()> allocate);

  // What is added and registered from now on belongs to `unit`: a layer, or 0, the root.
  void set_unit(int64_t unit);
  int64_t num_units() const { return num_units_; }

  std::vector<Param>& params() { return params_; }
  const std::vector<Param>& params() const { return params_; }
  // Throws [param] with the nearest facts if `name` is unknown.
  Param& at(const std::string& name);
  bool contains(const std::string& name) const;
  int64_t num_elements() const;

  void ensure_grads();  // allocates zeroed gradients that are missing
  void ensure_unit_grads(int64_t unit);
  void zero_grads();
  // What completes the gradients after the last backward of an update: sums of parts that lie on
  // several ranks of one copy of the model. All of these ranks call it; nothing for one process.
  void on_finish_grads(std::function<void()> finish) { finish_.push_back(std::move(finish)); }
  void finish_grads();
  void repack();  // masters -> compute forms, in registration order
  void repack_unit(int64_t unit);
  // Forms that have memory of their own lose it until the unit's next repack.
  void drop_forms(int64_t unit);

  // Set while masters and gradients are there only between enter() and leave(); borrowed.
  // zero_grads and rest are then those of its parts, repack tells it that they have changed.
  void set_keeper(ParamKeeper* keeper) { keeper_ = keeper; }
  ParamKeeper* keeper() const { return keeper_; }
  void enter(int64_t unit) {
    if (keeper_ != nullptr) keeper_->enter(unit);
  }
  void leave(int64_t unit) {
    if (keeper_ != nullptr) keeper_->leave(unit);
  }
  // Gives a parameter its values, all of them.
  void put(size_t param, const at::Tensor& values) {
    if (keeper_ != nullptr) return keeper_->put(param, values);
    params_[param].master.copy_(values);
  }
  // What the optimizer moves: this table, or the keeper's parts.
  ParamTable& owned() { return keeper_ != nullptr ? keeper_->parts() : *this; }

  // False between take_forms() and the next repack(): the model must not be run.
  bool has_forms() const { return has_forms_; }
  // False between take_masters() and restore_masters().
  bool has_masters() const { return has_masters_; }
  // The memory of the compute forms, or of the masters and the forms, to be freed by dropping what
  // is returned; nothing if it is gone already. Masters keep their shapes and lose their values.
  std::vector<c10::Storage> take_forms();
  std::vector<c10::Storage> take_masters();
  // Memory for the masters, with undefined values.
  void restore_masters();

  // The memory of all masters and, if asked for, of all compute forms, each once. A storage's
  // memory may be replaced by another of the same size and values.
  std::vector<c10::StorageImpl*> master_storages() const;
  std::vector<c10::StorageImpl*> form_storages() const;
  std::vector<c10::StorageImpl*> grad_storages() const;  // of gradients that are there

  // Registers what is done while masters and gradients are not needed (train/offload.h).
  void on_rest(std::function<void()> rest) { rest_.push_back(std::move(rest)); }
  // The masters will not be read for a while, and nobody wants the gradients' values any more.
  void rest();

 private:
  struct Form {
    std::function<void()> repack;
    EachTensor tensors;
    int64_t unit = 0;
  };
  std::vector<Param> params_;
  std::vector<Form> forms_;
  int64_t unit_ = 0;
  int64_t num_units_ = 1;
  bool masters_are_empty_ = false;
  ParamKeeper* keeper_ = nullptr;
  bool has_forms_ = true;
  bool has_masters_ = true;
  std::vector<std::pair<int64_t, std::function<void()>>> allocate_;  // with its unit
  std::vector<std::function<void()>> rest_;
  std::vector<std::function<void()>> finish_;
};

}  // namespace banyan
