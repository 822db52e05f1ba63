#include "banyan/algo/metric.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::algo {

void merge(const MetricMap& from, MetricMap& into) {
  for (const auto& [name, part] : from) {
    const auto [found, is_new] = into.emplace(name, part);
    if (is_new) continue;
    Metric& whole = found->second;
    BANYAN_ASSERT(whole.reduction == part.reduction, "metric ", name, " has two reductions");
    switch (whole.reduction) {
      case Reduction::kSum:
        whole.value += part.value;
        break;
      case Reduction::kMean:
        whole.value += part.value;
        whole.weight += part.weight;
        break;
      case Reduction::kMax:
        whole.value = std::max(whole.value, part.value);
        break;
      case Reduction::kMin:
        whole.value = std::min(whole.value, part.value);
        break;
    }
  }
}

double value_of(const Metric& metric) {
  if (metric.reduction != Reduction::kMean) return metric.value;
  return metric.weight > 0.0 ? metric.value / metric.weight : 0.0;
}

}  // namespace banyan::algo
