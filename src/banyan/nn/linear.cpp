#include "banyan/nn/linear.h"

namespace banyan::nn {
namespace {

std::vector<Weight::Part> weight_parts(std::vector<Weight::Part> parts) {
  for (Weight::Part& part : parts) part.name += ".weight";
  return parts;
}

std::vector<Vector::Part> bias_parts(const std::vector<Weight::Part>& parts) {
  std::vector<Vector::Part> out;
  for (const Weight::Part& part : parts) out.push_back({part.name + ".bias", part.out});
  return out;
}

}  // namespace

Linear::Linear(ParamTable& table,
               const std::vector<Weight::Part>& parts,
               int64_t in,
               bool bias,
               const ComputeOptions& options,
               bool with_backward)
    : options_(options), weight_(table, weight_parts(parts), in, options, with_backward) {
  if (bias) bias_ = std::make_unique<Vector>(table, bias_parts(parts), options);
}

at::Tensor Linear::forward(const at::Tensor& x, const at::Tensor& residual) const {
  return ops::linear_forward(
      x, weight_.compute(), bias_ ? bias_->compute() : at::Tensor(), residual);
}

at::Tensor Linear::forward_summed(const parallel::TensorParallel* tensor,
                                  const at::Tensor& x,
                                  const at::Tensor& residual) const {
  if (tensor == nullptr) return forward(x, residual);
  at::Tensor y = tensor->sum_rows(ops::linear_forward(x, weight_.compute(), /*bias=*/{}));
  if (bias_) y.add_(bias_->compute());
  return y.add_(residual);
}

kernels::PassProduct Linear::product() const {
  return {.weight = weight_.panels(),
          .bias = bias_ ? bias_->compute().const_data_ptr<c10::BFloat16>() : nullptr};
}

at::Tensor Linear::backward(const at::Tensor& dy, const at::Tensor& x) {
  backward_weight(dy, x);
  return backward_input(dy);
}

at::Tensor Linear::backward_input(const at::Tensor& dy) const {
  return ops::linear_backward_input(dy, weight_.compute());
}

void Linear::backward_weight(const at::Tensor& dy, const at::Tensor& x) {
  ops::linear_backward_weight(
      dy, x, weight_.grad(), bias_ ? bias_->grad() : at::Tensor(), options_);
}

}  // namespace banyan::nn
