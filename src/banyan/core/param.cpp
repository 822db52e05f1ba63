#include "banyan/core/param.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"

namespace banyan {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

std::unordered_set<c10::StorageImpl*> unique(const std::vector<c10::StorageImpl*>& storages) {
  return {storages.begin(), storages.end()};
}

}  // namespace

std::vector<int64_t> Cut::whole_shape(at::IntArrayRef own) const {
  std::vector<int64_t> shape = own.vec();
  if (!is_whole()) shape.at(dim) = whole;
  return shape;
}

at::Tensor Cut::part_of(const at::Tensor& tensor, int64_t size) const {
  return is_whole() ? tensor : tensor.narrow(dim, begin, size);
}

int64_t ParamTable::add(std::string name, at::Tensor master, Cut cut) {
  BANYAN_ASSERT(!contains(name), "parameter '", name, "' registered twice");
  BANYAN_ASSERT(master.is_contiguous(), "parameter '", name, "' is not contiguous");
  params_.push_back(Param{std::move(name), std::move(master), {}, cut});
  params_.back().unit = unit_;
  return static_cast<int64_t>(params_.size()) - 1;
}

void ParamTable::set_unit(int64_t unit) {
  unit_ = unit;
  num_units_ = std::max(num_units_, unit + 1);
}

void ParamTable::on_repack(std::function<void()> repack, EachTensor tensors) {
  forms_.push_back({std::move(repack), std::move(tensors), unit_});
}

void ParamTable::on_ensure_grads(std::function<void()> allocate) {
  allocate_.emplace_back(unit_, std::move(allocate));
}

Param& ParamTable::at(const std::string& name) {
  for (Param& param : params_) {
    if (param.name == name) return param;
  }
  BANYAN_CHECK(false, "[param] no parameter named '", name, "' among ", params_.size());
  throw;  // unreachable: BANYAN_CHECK(false) throws
}

bool ParamTable::contains(const std::string& name) const {
  for (const Param& param : params_) {
    if (param.name == name) return true;
  }
  return false;
}

int64_t ParamTable::num_elements() const {
  int64_t total = 0;
  for (const Param& param : params_) total += param.master.numel();
  return total;
}

void ParamTable::ensure_grads() {
  for (int64_t unit = 0; unit < num_units_; ++unit) ensure_unit_grads(unit);
}

void ParamTable::ensure_unit_grads(int64_t unit) {
  for (const auto& [of, allocate] : allocate_) {
    if (of == unit) allocate();
  }
  for (Param& param : params_) {
    if (param.unit == unit && !param.grad.defined()) param.grad = at::zeros_like(param.master);
  }
}

void ParamTable::zero_grads() {
  if (keeper_ != nullptr) return keeper_->parts().zero_grads();
  const profile::Scope timed("zero gradients",
                             [&] { return profile::Work{.bytes = 4 * num_elements()}; });
  for (Param& param : params_) {
    if (param.grad.defined()) param.grad.zero_();
  }
}

void ParamTable::repack() {
  if (keeper_ != nullptr) return keeper_->changed();
  // A master is read; up to two bf16 forms are written.
  const profile::Scope timed("repack weights",
                             [&] { return profile::Work{.bytes = 8 * num_elements()}; });
  BANYAN_ASSERT(has_masters_, "repack without masters");
  for (const Form& form : forms_) form.repack();
  has_forms_ = true;
}

void ParamTable::repack_unit(int64_t unit) {
  for (const Form& form : forms_) {
    if (form.unit == unit) form.repack();
  }
}

void ParamTable::drop_forms(int64_t unit) {
  for (const Form& form : forms_) {
    if (form.unit == unit && form.tensors)
      form.tensors([](at::Tensor& tensor) { tensor = at::Tensor(); });
  }
}

// A form may be the master itself.
std::vector<c10::Storage> ParamTable::take_forms() {
  std::vector<c10::Storage> out;
  if (!has_forms_) return out;
  has_forms_ = false;
  std::unordered_set<c10::StorageImpl*> seen = unique(master_storages());
  for (const Form& form : forms_) {
    if (!form.tensors) continue;
    form.tensors([&](at::Tensor& tensor) {
      if (seen.insert(storage_of(tensor)).second) out.push_back(tensor.storage());
      tensor = at::Tensor();
    });
  }
  return out;
}

std::vector<c10::StorageImpl*> ParamTable::master_storages() const {
  std::vector<c10::StorageImpl*> out;
  std::unordered_set<c10::StorageImpl*> seen;
  for (const Param& param : params_) {
    if (seen.insert(storage_of(param.master)).second) out.push_back(storage_of(param.master));
  }
  return out;
}

std::vector<c10::StorageImpl*> ParamTable::form_storages() const {
  std::vector<c10::StorageImpl*> out;
  std::unordered_set<c10::StorageImpl*> seen = unique(master_storages());
  for (const Form& form : forms_) {
    if (!form.tensors) continue;
    form.tensors([&](at::Tensor& tensor) {
      if (seen.insert(storage_of(tensor)).second) out.push_back(storage_of(tensor));
    });
  }
  return out;
}

std::vector<c10::StorageImpl*> ParamTable::grad_storages() const {
  std::vector<c10::StorageImpl*> out;
  std::unordered_set<c10::StorageImpl*> seen;
  for (const Param& param : params_) {
    if (!param.grad.defined()) continue;
    if (seen.insert(storage_of(param.grad)).second) out.push_back(storage_of(param.grad));
  }
  return out;
}

void ParamTable::finish_grads() {
  for (const auto& finish : finish_) finish();
}

void ParamTable::rest() {
  if (keeper_ != nullptr) return keeper_->parts().rest();
  for (const auto& rest : rest_) rest();
}

// Params may be row ranges of one matrix: a storage that is empty already was another's.
std::vector<c10::Storage> ParamTable::take_masters() {
  std::vector<c10::Storage> out = take_forms();
  if (!has_masters_) return out;
  has_masters_ = false;
  for (const Param& param : params_) {
    c10::StorageImpl* storage = param.master.storage().unsafeGetStorageImpl();
    const size_t num_bytes = storage->nbytes();
    if (num_bytes == 0) continue;
    at::DataPtr memory = storage->set_data_ptr(storage->allocator()->allocate(0));
    storage->set_nbytes(0);
    out.emplace_back(c10::Storage::use_byte_size_t(),
                     num_bytes,
                     std::move(memory),
                     storage->allocator(),
                     /*resizable=*/false);
  }
  return out;
}

void ParamTable::restore_masters() {
  if (has_masters_) return;
  std::unordered_map<c10::StorageImpl*, int64_t> num_elements;  // up to the end of the last view
  for (const Param& param : params_) {
    int64_t& end = num_elements[param.master.storage().unsafeGetStorageImpl()];
    end = std::max(end, param.master.storage_offset() + param.master.numel());
  }
  for (const Param& param : params_) {
    c10::StorageImpl* storage = param.master.storage().unsafeGetStorageImpl();
    if (storage->nbytes() != 0) continue;
    const size_t num_bytes = num_elements.at(storage) * param.master.element_size();
    storage->set_data_ptr_noswap(storage->allocator()->allocate(num_bytes));
    storage->set_nbytes(num_bytes);
  }
  has_masters_ = true;
}

}  // namespace banyan
