#include "banyan/parallel/gradient_sum.h"

#include "banyan/core/error.h"

namespace banyan::parallel {

FlatSlices slices_of(const ParamTable& params, int64_t num_ranks, int64_t bucket_elements) {
  std::vector<int64_t> sizes;
  for (const Param& param : params.params()) {
    BANYAN_ASSERT(param.master.scalar_type() == params.params()[0].master.scalar_type(),
                  "parameter '",
                  param.name,
                  "' has another type than the first");
    sizes.push_back(param.master.numel());
  }
  return {sizes, num_ranks, bucket_elements};
}

std::vector<at::Tensor> gradients_of(const ParamTable& params) {
  std::vector<at::Tensor> out;
  for (const Param& param : params.params()) {
    BANYAN_ASSERT(param.grad.is_contiguous(), "gradient of '", param.name, "' has gaps");
    out.push_back(param.grad);
  }
  return out;
}

std::vector<at::Tensor> masters_of(const ParamTable& params) {
  std::vector<at::Tensor> out;
  for (const Param& param : params.params()) out.push_back(param.master);
  return out;
}

namespace {

void sum_all(const std::vector<at::Tensor>& gradients,
             Collectives& ranks,
             int64_t bucket_elements) {
  if (ranks.is_alone() || gradients.empty()) return;
  std::vector<int64_t> sizes;
  for (const at::Tensor& gradient : gradients) sizes.push_back(gradient.numel());
  const FlatSlices slices(sizes, ranks.size(), bucket_elements);
  slices.reduce(gradients, ranks);
  slices.gather(gradients, ranks);
}

}  // namespace

void sum_gradients(ParamTable& params,
                   Collectives& ranks,
                   int64_t bucket_elements,
                   Collectives* expert_ranks) {
  const std::vector<at::Tensor> gradients = gradients_of(params);
  std::vector<at::Tensor> common;
  std::vector<at::Tensor> dealt;
  for (size_t i = 0; i < gradients.size(); ++i) {
    (params.params()[i].is_dealt ? dealt : common).push_back(gradients[i]);
  }
  sum_all(common, ranks, bucket_elements);
  if (dealt.empty()) return;
  BANYAN_ASSERT(expert_ranks != nullptr, "gradients of experts: nobody says who holds the same");
  sum_all(dealt, *expert_ranks, bucket_elements);
}

}  // namespace banyan::parallel
