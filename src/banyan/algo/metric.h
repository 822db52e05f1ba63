// A figure that says itself how its parts from several mini-batches become one (algorithms spec
// T16): nothing is guessed from its name. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace banyan::algo {

enum class Reduction : uint8_t { kSum, kMean, kMax, kMin };

// kMean: value is a sum of `weight` terms, so means over tokens stay exact over any split.
struct Metric {
  double value = 0.0;
  double weight = 1.0;
  Reduction reduction = Reduction::kMean;
};

// Names without their prefix: the caller adds "actor/", "rollout_corr/", ...
using MetricMap = std::map<std::string, Metric>;

inline Metric mean_of(double sum, double count) { return {sum, count, Reduction::kMean}; }
inline Metric sum_of(double value) { return {value, 1.0, Reduction::kSum}; }
inline Metric max_of(double value) { return {value, 1.0, Reduction::kMax}; }
inline Metric min_of(double value) { return {value, 1.0, Reduction::kMin}; }

// Adds the metrics `from` to `into`; a name keeps its reduction (a bug of ours otherwise).
void merge(const MetricMap& from, MetricMap& into);

// The figure to log. A mean of nothing is 0.
double value_of(const Metric& metric);

}  // namespace banyan::algo
