#include "banyan/core/param.h"

#include <ATen/ops/zeros_like.h>

#include "banyan/core/error.h"

namespace banyan {

int64_t ParamTable::add(std::string name, at::Tensor master) {
  BANYAN_ASSERT(!contains(name), "parameter '", name, "' registered twice");
  BANYAN_ASSERT(master.is_contiguous(), "parameter '", name, "' is not contiguous");
  params_.push_back(Param{std::move(name), std::move(master), {}});
  return static_cast<int64_t>(params_.size()) - 1;
}

void ParamTable::on_repack(std::function<void()> repack) { repack_.push_back(std::move(repack)); }

void ParamTable::on_ensure_grads(std::function<void()> allocate) {
  allocate_.push_back(std::move(allocate));
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
  for (const auto& allocate : allocate_) allocate();
  for (Param& param : params_) {
    if (!param.grad.defined()) param.grad = at::zeros_like(param.master);
  }
}

void ParamTable::zero_grads() {
  for (Param& param : params_) {
    if (param.grad.defined()) param.grad.zero_();
  }
}

void ParamTable::repack() {
  for (const auto& repack : repack_) repack();
}

}  // namespace banyan
