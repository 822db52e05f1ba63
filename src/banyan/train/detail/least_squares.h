// Least squares with coefficients >= 0, for the few constants of a cost model. Torch-free.
#pragma once

#include <vector>

namespace banyan::train::detail {

// x >= 0 that minimises sum over rows of (row . x - target)^2, exactly: of all sets of coefficients
// that may differ from zero (there are at most 2^8), the best whose unconstrained solution is not
// negative. Rows have one length, 1 to 8. A column that the rows do not determine gets 0.
std::vector<double> non_negative_least_squares(const std::vector<std::vector<double>>& rows,
                                               const std::vector<double>& targets);

}  // namespace banyan::train::detail
