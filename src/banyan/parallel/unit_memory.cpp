#include "banyan/parallel/unit_memory.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <unordered_map>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

std::vector<size_t> params_of(const ParamTable& table, int64_t unit) {
  std::vector<size_t> out;
  for (size_t i = 0; i < table.params().size(); ++i) {
    if (table.params()[i].unit == unit) out.push_back(i);
  }
  return out;
}

std::vector<at::Tensor> masters_of(const ParamTable& table, int64_t unit, bool is_form) {
  std::vector<at::Tensor> out;
  for (const Param& param : table.params()) {
    if (param.unit == unit && param.is_form == is_form) out.push_back(param.master);
  }
  return out;
}

}  // namespace

ComingMemory::ComingMemory(const std::vector<at::Tensor>& tensors) {
  std::unordered_map<c10::StorageImpl*, size_t> places;
  for (const at::Tensor& tensor : tensors) {
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const auto [found, is_new] = places.emplace(storage, storages_.size());
    if (is_new) {
      storages_.push_back(tensor.storage());
      num_bytes_.push_back(storage->nbytes());
      is_there_ = is_there_ && storage->nbytes() > 0;
    }
    // Of a storage without memory the tensors say how much it takes.
    const auto end = static_cast<size_t>(tensor.storage_offset() + tensor.numel());
    size_t& num_bytes = num_bytes_[found->second];
    num_bytes = std::max(num_bytes, end * tensor.element_size());
  }
}

void ComingMemory::take() {
  if (is_there_) return;
  for (size_t i = 0; i < storages_.size(); ++i) {
    c10::StorageImpl* storage = storages_[i].unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(storage->allocator()->allocate(num_bytes_[i]));
    storage->set_nbytes(num_bytes_[i]);
  }
  is_there_ = true;
}

void ComingMemory::drop() {
  if (!is_there_) return;
  for (const c10::Storage& each : storages_) {
    c10::StorageImpl* storage = each.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
    storage->set_nbytes(0);
  }
  is_there_ = false;
}

UnitWeights::UnitWeights(ParamTable& table, int64_t unit)
    : table_(table),
      unit_(unit),
      params_(params_of(table, unit)),
      kept_(masters_of(table, unit, /*is_form=*/true)),
      passing_(masters_of(table, unit, /*is_form=*/false)) {
  for (const size_t i : params_) {
    num_elements_ += table.params()[i].master.numel();
    has_form_ = has_form_ || table.params()[i].is_form;
  }
}

void UnitWeights::fill(const at::Tensor& flat) {
  BANYAN_ASSERT(flat.numel() >= num_elements_, "unit ", unit_, " from ", flat.numel(), " numbers");
  take();
  int64_t at = 0;
  for (const size_t i : params_) {
    const at::Tensor& master = table_.params()[i].master;
    master.view({-1}).copy_(flat.narrow(0, at, master.numel()));
    at += master.numel();
  }
  complete();
}

void UnitWeights::take() {
  kept_.take();
  passing_.take();
}

void UnitWeights::complete() {
  table_.repack_unit(unit_);
  passing_.drop();
}

void UnitWeights::drop() {
  table_.drop_forms(unit_);
  kept_.drop();
  passing_.drop();
}

at::Tensor UnitWeights::flat_masters() const {
  std::vector<at::Tensor> parts;
  for (const size_t i : params_) parts.push_back(table_.params()[i].master.view({-1}));
  return at::cat(parts);
}

}  // namespace banyan::parallel
