// Training on given text over several ranks: every rank is given the rows of a batch, knows its
// weight and computes some of its examples; losses and gradients are shares of the batch's mean and
// are added.
#pragma once

#include <cstdint>
#include <vector>

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

// (all) The figures of the whole batch of `weight`.
BatchResult merge_batch(const BatchResult& own, double weight, parallel::Collectives& ranks);

}  // namespace banyan::train
