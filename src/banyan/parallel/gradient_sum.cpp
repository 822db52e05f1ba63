#include "banyan/parallel/gradient_sum.h"

#include "banyan/core/error.h"

namespace banyan::parallel {

std::vector<size_t> params_with_copies(const ParamTable& params, bool dealt) {
  std::vector<size_t> which;
  for (size_t i = 0; i < params.params().size(); ++i) {
    if (params.params()[i].is_dealt == dealt) which.push_back(i);
  }
  return which;
}

FlatSlices slices_of(const ParamTable& params,
                     const std::vector<size_t>& which,
                     int64_t num_ranks,
                     int64_t bucket_elements) {
  std::vector<int64_t> sizes;
  for (const size_t i : which) {
    const Param& param = params.params()[i];
    BANYAN_ASSERT(param.master.scalar_type() == params.params()[0].master.scalar_type(),
                  "parameter '",
                  param.name,
                  "' has another type than the first");
    sizes.push_back(param.master.numel());
  }
  return {sizes, num_ranks, bucket_elements};
}

std::vector<at::Tensor> gradients_of(const ParamTable& params, const std::vector<size_t>& which) {
  std::vector<at::Tensor> out;
  for (const size_t i : which) {
    const Param& param = params.params()[i];
    BANYAN_ASSERT(param.grad.is_contiguous(), "gradient of '", param.name, "' has gaps");
    out.push_back(param.grad);
  }
  return out;
}

std::vector<at::Tensor> masters_of(const ParamTable& params, const std::vector<size_t>& which) {
  std::vector<at::Tensor> out;
  for (const size_t i : which) out.push_back(params.params()[i].master);
  return out;
}

namespace {

void sum_some(ParamTable& params, bool dealt, Collectives& ranks, int64_t bucket_elements) {
  if (ranks.is_alone()) return;
  const std::vector<size_t> which = params_with_copies(params, dealt);
  const FlatSlices slices = slices_of(params, which, ranks.size(), bucket_elements);
  const std::vector<at::Tensor> gradients = gradients_of(params, which);
  slices.reduce(gradients, ranks);
  slices.gather(gradients, ranks);
}

}  // namespace

void sum_gradients(ParamTable& params,
                   Collectives& ranks,
                   int64_t bucket_elements,
                   Collectives* expert_ranks) {
  sum_some(params, /*dealt=*/false, ranks, bucket_elements);
  if (params_with_copies(params, /*dealt=*/true).empty()) return;
  BANYAN_ASSERT(expert_ranks != nullptr, "gradients of experts: nobody says who holds the same");
  sum_some(params, /*dealt=*/true, *expert_ranks, bucket_elements);
}

}  // namespace banyan::parallel
