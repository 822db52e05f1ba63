// Training on given text over several ranks: the examples of a batch are spread, each rank's
// objective takes the mean over its own weight w (scored tokens, or pairs), and the batch's mean is
//   loss = sum_r (w_r / W) loss_r,   gradient = sum_r (w_r / W) gradient_r,   W = sum_r w_r
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/parallel/collectives.h"
#include "banyan/train/objective.h"

namespace banyan::train {

// Rows of a batch with their examples, and the part of them that this rank computes.
struct RowsOfRank {
  std::vector<int64_t> rows;
  std::vector<Example> examples;
};

// By tokens, the longest first (parallel/balance.h); the order of the batch is kept.
RowsOfRank spread_rows(const std::vector<int64_t>& rows,
                       std::vector<Example> examples,
                       const parallel::Collectives& ranks);

// The figures of the whole batch; `share` becomes w_r / W.
BatchResult merge_batch(const BatchResult& own, parallel::Collectives& ranks, double& share);

// Gradients times `share`.
void scale_gradients(ParamTable& params, double share);

}  // namespace banyan::train
