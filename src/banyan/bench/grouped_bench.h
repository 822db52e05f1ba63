// What grouped attention is worth: one long trunk, n responses, the same engine with and without
// it.
//
// Both sides prefill the trunk once, so the ratio that counts is of the decode steps alone: the
// time of `new_tokens` tokens less the time of one. The tokens drawn are the same on both sides and
// are compared.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/models/causal_lm.h"

namespace banyan::bench {

struct GroupedBenchOptions {
  int64_t trunk_tokens = 2048;
  int32_t n = 32;
  int32_t new_tokens = 64;
  int64_t repeats = 3;
  uint64_t seed = 1;  // of the trunk and the draws
};

struct GroupedSide {
  std::vector<double> seconds;  // of whole calls
  double prompt_seconds = 0.0;  // median of calls for one token
  double decode_seconds = 0.0;  // median of the calls less prompt_seconds
};

struct GroupedBenchResult {
  GroupedSide on;
  GroupedSide off;
  double ratio = 0.0;        // decode seconds off / on
  double whole_ratio = 0.0;  // of whole calls
};

// Throws [bench] if the two sides draw different tokens.
GroupedBenchResult bench_grouped(models::CausalLM& model, const GroupedBenchOptions& options);

}  // namespace banyan::bench
