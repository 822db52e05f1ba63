// How cost grows with the batch: passes over batches of different sizes, in turn, and the time that
// planning takes by itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/trie/plan.h"

namespace banyan::bench {

struct ScalingOptions {
  std::vector<std::string> presets;  // names of workload.h
  uint64_t seed = 1;
  trie::PlanOptions plan;
  int64_t repeats = 3;
};

struct ScalingSide {
  int64_t logical_tokens = 0;
  int64_t unique_tokens = 0;
  int64_t blocks = 0;
  std::vector<double> seconds;  // of the counted passes
  double median = 0.0;
};

// Planning, forward and backward of each preset, `repeats` rounds after one that warms up; a round
// runs every preset once.
std::vector<ScalingSide> bench_scaling(models::CausalLM& model, const ScalingOptions& options);

// Trie build and planning alone.
std::vector<ScalingSide> bench_planning(int64_t vocab, const ScalingOptions& options);

}  // namespace banyan::bench
