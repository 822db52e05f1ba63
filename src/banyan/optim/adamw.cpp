#include "banyan/optim/adamw.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/adamw.h"
#include "banyan/parallel/gradient_sum.h"

namespace banyan::optim {
namespace {

bool has_kernel(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.is_contiguous();
}

double sum_of_squares(const at::Tensor& grad) {
  if (has_kernel(grad, at::kFloat)) {
    return kernels::sum_of_squares(grad.numel(), grad.const_data_ptr<float>());
  }
  if (has_kernel(grad, at::kDouble)) {
    return kernels::sum_of_squares(grad.numel(), grad.const_data_ptr<double>());
  }
  const double norm =
      at::linalg_vector_norm(grad, 2, std::nullopt, false, at::kDouble).item<double>();
  return norm * norm;
}

// The factors of one step in double; the kernel and the plain operators read the same ones.
struct Factors {
  double decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_correction2, eps;
};

kernels::AdamWStep to_kernel(const Factors& f, double grad_scale) {
  kernels::AdamWStep step;
  step.grad_scale = static_cast<float>(grad_scale);
  step.decay = static_cast<float>(f.decay);
  step.one_minus_beta1 = static_cast<float>(f.one_minus_beta1);
  step.beta2 = static_cast<float>(f.beta2);
  step.one_minus_beta2 = static_cast<float>(f.one_minus_beta2);
  step.step_size = static_cast<float>(f.step_size);
  step.inverse_correction2 = static_cast<float>(f.inverse_correction2);
  step.eps = static_cast<float>(f.eps);
  return step;
}

void step_aten(const Factors& f,
               double grad_scale,
               const at::Tensor& grad,
               at::Tensor& master,
               at::Tensor& m,
               at::Tensor& v) {
  const at::Tensor g = grad.mul(grad_scale);
  m.lerp_(g, f.one_minus_beta1);
  v.mul_(f.beta2).addcmul_(g, g, f.one_minus_beta2);
  const at::Tensor divisor = v.sqrt().mul_(f.inverse_correction2).add_(f.eps);
  master.mul_(f.decay).addcdiv_(m, divisor, -f.step_size);
}

void check_options(const AdamWOptions& options) {
  const auto is_beta = [](double beta) { return beta >= 0.0 && beta < 1.0; };
  BANYAN_CHECK(is_beta(options.beta1) && is_beta(options.beta2),
               "[optim.betas] wanted two numbers in [0, 1), got ",
               options.beta1,
               " and ",
               options.beta2);
  BANYAN_CHECK(std::isfinite(options.eps) && options.eps >= 0.0,
               "[optim.eps] wanted a finite number >= 0, got ",
               options.eps);
  BANYAN_CHECK(std::isfinite(options.weight_decay) && options.weight_decay >= 0.0,
               "[optim.weight_decay] wanted a finite number >= 0, got ",
               options.weight_decay);
}

}  // namespace

namespace {

double sum_of_squares(const ParamTable& params) {
  const profile::Scope timed("gradient norm",
                             [&] { return profile::Work{.bytes = 4 * params.num_elements()}; });
  double total = 0.0;
  for (const Param& param : params.params()) {
    if (param.grad.defined() && !param.is_copy) total += sum_of_squares(param.grad);
  }
  return total;
}

double sum_over(parallel::Collectives* ranks, double own) {
  if (parallel::is_alone(ranks)) return own;
  double total = 0.0;
  for (const double part : ranks->all_gather_number(own)) total += part;
  return total;
}

}  // namespace

double grad_norm(const ParamTable& params) { return std::sqrt(sum_of_squares(params)); }

AdamW::AdamW(ParamTable& params,
             const AdamWOptions& options,
             parallel::Collectives* ranks,
             parallel::Collectives* model,
             parallel::Collectives* experts)
    : params_(params), model_(model), options_(options) {
  check_options(options);
  const bool shares_experts =
      !parallel::is_alone(experts) && !parallel::params_with_copies(params, true).empty();
  if (!parallel::is_alone(ranks) || (ranks != nullptr && shares_experts)) {
    ranks_ = ranks;
    share_out(*ranks, /*dealt=*/false);
    if (experts != nullptr) share_out(*experts, /*dealt=*/true);
    BANYAN_ASSERT(experts != nullptr || parallel::params_with_copies(params, true).empty(),
                  "AdamW: nobody says who holds the same experts");
    return;
  }
  for (size_t i = 0; i < params.params().size(); ++i) {
    const at::Tensor& master = params.params()[i].master;
    own_.push_back({i, 0, master.numel()});
    m_.push_back(at::zeros_like(master));
    v_.push_back(at::zeros_like(master));
  }
}

void AdamW::share_out(parallel::Collectives& ranks, bool dealt) {
  Copies copies{&ranks, parallel::params_with_copies(params_, dealt), {}};
  copies.slices =
      parallel::slices_of(params_, copies.params, ranks.size(), parallel::kBucketElements);
  for (parallel::Range range : copies.slices.owned(ranks.rank())) {
    range.tensor = copies.params[range.tensor];
    own_.push_back(range);
    m_.push_back(at::zeros_like(parallel::view_of(params_.params()[range.tensor].master, range)));
    v_.push_back(at::zeros_like(m_.back()));
  }
  copies_.push_back(std::move(copies));
}

void AdamW::reduce_gradients() {
  for (const Copies& copies : copies_) {
    copies.slices.reduce(parallel::gradients_of(params_, copies.params), *copies.ranks);
  }
}

double AdamW::grad_norm() {
  parallel::Collectives* ranks = is_sharded() ? ranks_ : norm_ranks_;
  if (!is_sharded() && parallel::is_alone(ranks)) {
    return std::sqrt(sum_over(model_, sum_of_squares(params_)));
  }
  double own = 0.0;
  for (const parallel::Range& range : own_) {
    const Param& param = params_.params()[range.tensor];
    if (!param.is_copy) own += sum_of_squares(parallel::view_of(param.grad, range));
  }
  return std::sqrt(sum_over(model_, sum_over(ranks, own)));
}

void AdamW::gather_moments() {
  if (!is_sharded()) return;
  make_moments();
  for (size_t i = 0; i < own_.size(); ++i) {
    parallel::view_of(whole_m_[own_[i].tensor], own_[i]).copy_(m_[i]);
    parallel::view_of(whole_v_[own_[i].tensor], own_[i]).copy_(v_[i]);
  }
  for (const Copies& copies : copies_) {
    for (const std::vector<at::Tensor>* moments : {&whole_m_, &whole_v_}) {
      std::vector<at::Tensor> theirs;
      for (const size_t i : copies.params) theirs.push_back((*moments)[i]);
      copies.slices.gather(theirs, *copies.ranks);
    }
  }
}

std::vector<at::Tensor> AdamW::held_moments() const {
  std::vector<at::Tensor> held = m_;
  held.insert(held.end(), v_.begin(), v_.end());
  return held;
}

void AdamW::make_moments() {
  if (!is_sharded()) return;
  whole_m_.clear();
  whole_v_.clear();
  for (const Param& param : params_.params()) {
    whole_m_.push_back(at::zeros_like(param.master));
    whole_v_.push_back(at::zeros_like(param.master));
  }
}

void AdamW::take_moments() {
  if (!is_sharded()) return;
  for (size_t i = 0; i < own_.size(); ++i) {
    m_[i].copy_(parallel::view_of(whole_m_[own_[i].tensor], own_[i]));
    v_[i].copy_(parallel::view_of(whole_v_[own_[i].tensor], own_[i]));
  }
  whole_m_.clear();
  whole_v_.clear();
}

void AdamW::step(double lr, double grad_scale) {
  // Reads the gradient; reads and writes master and both moments.
  const profile::Scope timed("AdamW",
                             [&] { return profile::Work{.bytes = 28 * params_.num_elements()}; });
  ++num_steps_;
  const auto t = static_cast<double>(num_steps_);
  const Factors factors{
      .decay = 1.0 - lr * options_.weight_decay,
      .one_minus_beta1 = 1.0 - options_.beta1,
      .beta2 = options_.beta2,
      .one_minus_beta2 = 1.0 - options_.beta2,
      .step_size = lr / (1.0 - std::pow(options_.beta1, t)),
      .inverse_correction2 = 1.0 / std::sqrt(1.0 - std::pow(options_.beta2, t)),
      .eps = options_.eps,
  };
  const kernels::AdamWStep kernel = to_kernel(factors, grad_scale);
  std::vector<Param>& params = params_.params();
  BANYAN_ASSERT(is_sharded() || params.size() == m_.size(),
                "AdamW: parameters were added after the optimizer");
  for (size_t i = 0; i < own_.size(); ++i) {
    const Param& param = params[own_[i].tensor];
    BANYAN_ASSERT(param.grad.defined(), "AdamW: no gradient for '", param.name, "'");
    // One process steps whole parameters, in their shapes.
    at::Tensor master = is_sharded() ? parallel::view_of(param.master, own_[i]) : param.master;
    const at::Tensor grad = is_sharded() ? parallel::view_of(param.grad, own_[i]) : param.grad;
    if (has_kernel(master, at::kFloat) && has_kernel(grad, at::kFloat)) {
      kernels::adamw(kernel,
                     master.numel(),
                     grad.const_data_ptr<float>(),
                     master.mutable_data_ptr<float>(),
                     m_[i].mutable_data_ptr<float>(),
                     v_[i].mutable_data_ptr<float>());
    } else {
      step_aten(factors, grad_scale, grad, master, m_[i], v_[i]);
    }
    if (stepped_) stepped_(param);
  }
  for (const Copies& copies : copies_) {
    copies.slices.gather(parallel::masters_of(params_, copies.params), *copies.ranks);
  }
}

}  // namespace banyan::optim
