#include "banyan/algo/group_filter.h"

#include <map>

#include "banyan/core/error.h"

namespace banyan::algo {

std::vector<int64_t> flat_groups(const std::vector<int64_t>& group,
                                 const std::vector<uint8_t>& valid,
                                 const std::vector<double>& metric) {
  BANYAN_ASSERT(group.size() == valid.size() && group.size() == metric.size(),
                "flat_groups: sizes");
  std::map<int64_t, std::vector<double>> values;
  for (size_t i = 0; i < group.size(); ++i) {
    std::vector<double>& members = values[group[i]];
    if (valid[i]) members.push_back(metric[i]);
  }
  std::vector<int64_t> flat;
  for (const auto& [id, members] : values) {
    bool is_flat = members.size() != 1;
    for (const double value : members) is_flat = is_flat && value == members[0];
    if (is_flat) flat.push_back(id);
  }
  return flat;
}

}  // namespace banyan::algo
