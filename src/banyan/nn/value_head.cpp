#include "banyan/nn/value_head.h"

#include <ATen/ops/zeros.h>

namespace banyan::nn {

ValueHead::ValueHead(ParamTable& table,
                     int64_t hidden,
                     bool with_bias,
                     const ComputeOptions& options)
    : table_(table) {
  const at::ScalarType dtype = options.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::TensorOptions like = at::TensorOptions().dtype(dtype).device(options.device);
  compute_.weight = at::zeros({1, hidden}, like);
  weight_ = table.add("score.weight", compute_.weight);
  if (!with_bias) return;
  compute_.bias = at::zeros({1}, like);
  bias_ = table.add("score.bias", compute_.bias);
}

at::Tensor& ValueHead::grad_weight() { return table_.params()[weight_].grad; }

at::Tensor ValueHead::grad_bias() const {
  return bias_ < 0 ? at::Tensor() : table_.params()[bias_].grad;
}

}  // namespace banyan::nn
