// What every model has without a way of its own: the pass of the rollout in terms of forward, on
// every device and dtype, and the tensors of a whole model.
#include "banyan/models/causal_lm.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

namespace banyan::models {

std::vector<TensorShape> CausalLM::tensors() {
  std::vector<TensorShape> out;
  for (const Param& param : params().params()) {
    out.push_back({param.name, param.cut.whole_shape(param.master.sizes())});
  }
  return out;
}

at::Tensor CausalLM::infer(ops::KvPool& pool, const ops::PagedBatch& batch) {
  const at::Device device = options().device;
  const auto on_device = [&](const std::vector<int32_t>& values) {
    return at::tensor(values, at::kInt).to(device);
  };
  ops::PagedAttention attention(pool, batch.runs(), batch.grouped());
  const at::Tensor hidden =
      forward(on_device(batch.ids()), on_device(batch.positions()), attention, /*saved=*/nullptr);
  return at::index_select(hidden, 0, on_device(batch.wanted()));
}

}  // namespace banyan::models
