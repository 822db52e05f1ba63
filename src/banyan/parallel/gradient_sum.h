// Sums the gradients of a model over the ranks that hold copies of it.
#pragma once

#include <cstdint>

#include "banyan/core/param.h"
#include "banyan/parallel/flat_slices.h"

namespace banyan::parallel {

// Parameters of which the same ranks hold copies: those of experts that are dealt out, or all
// others, by their places in the table.
std::vector<size_t> params_with_copies(const ParamTable& params, bool dealt);

// Their stream, gradients and masters.
FlatSlices slices_of(const ParamTable& params,
                     const std::vector<size_t>& which,
                     int64_t num_ranks,
                     int64_t bucket_elements);
std::vector<at::Tensor> gradients_of(const ParamTable& params, const std::vector<size_t>& which);
std::vector<at::Tensor> masters_of(const ParamTable& params, const std::vector<size_t>& which);

// grad <- sum over all ranks of grad, for every parameter, in rank order, so that the sums depend
// neither on the buckets nor on the run. All ranks need gradients of the same shapes. Moves
// 2 N (n - 1) / n numbers, and up to n - 1 more per bucket where n does not divide it.
// Gradients of experts that are dealt out are added over `expert_ranks`, who hold the same ones.
void sum_gradients(ParamTable& params,
                   Collectives& ranks,
                   int64_t bucket_elements = kBucketElements,
                   Collectives* expert_ranks = nullptr);

}  // namespace banyan::parallel
