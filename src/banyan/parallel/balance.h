// Which rank takes which piece of work, so that all are done at about the same time. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace banyan::parallel {

struct Balance {
  std::vector<std::vector<int64_t>> pieces;  // [ranks] indices of the pieces of a rank, ascending
  std::vector<double> load;                  // [ranks] their cost
};

// The dearest piece first, each to the rank that has least so far (Graham, "Bounds on
// multiprocessing timing anomalies", 1969: at most 4/3 of the optimum). Equal costs go by index,
// equal loads to the lower rank: every process finds the same answer.
Balance balance(const std::vector<double>& costs, int64_t num_ranks);

// Highest load over the mean load; 1 is even. 1 where nothing is to be done.
double imbalance(const std::vector<double>& load);

}  // namespace banyan::parallel
