// DAPO's dynamic sampling (Yu et al., 2025): which groups teach nothing. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace banyan::algo {

// Groups with more than one valid member whose metric is the same for all of them (standard
// deviation 0, compared exactly), ascending. A group without a valid member is dropped as well; a
// group with one is kept.
std::vector<int64_t> flat_groups(const std::vector<int64_t>& group,
                                 const std::vector<uint8_t>& valid,
                                 const std::vector<double>& metric);

}  // namespace banyan::algo
