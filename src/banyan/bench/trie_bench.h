// What sharing is worth: the same batch with sharing on and off, forward and backward, in turn.
//
// Sharing off is the packed, unpadded pass of the same kernels over every sample by itself. Trie
// build and planning are inside the measured time, and so are replayed trunks and carried keys when
// the plan is cut. The loss is the mean negative log-probability of the scored tokens; both sides'
// loss and gradient norm are reported, so that a figure is never of two different results.
// FLOPs-ideal (specification D1): 6 N_body T + 12 d_attn layers pairs + 6 d V head_rows of the
// unshared batch over the same of the uncut trie.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/trie/plan.h"

namespace banyan::bench {

struct TrieBenchOptions {
  std::string preset;
  uint64_t seed = 1;
  trie::PlanOptions plan;     // limits of a block; build.share and cost are set here
  bool longest_path = false;  // sharing on: the budget is the longest path, whatever plan says
  int64_t repeats = 5;        // timed passes with sharing on, after one warm-up
  double off_seconds = 60.0;  // sharing off is repeated as long as its passes fit into this, at
                              // least once and at most `repeats` times; a first pass that takes
                              // more than half of it is counted, else it is a warm-up
};

struct Side {
  std::vector<double> seconds;  // of every counted pass
  double median = 0.0;
  double cpu_median = 0.0;  // processor time of all threads: steadier where others use the machine
  double plan_seconds = 0.0;  // build and planning, median
  double modelled_seconds = 0.0;
  int64_t blocks = 0;
  int64_t computed_tokens = 0;    // replayed ones included
  int64_t recomputed_tokens = 0;  // run forward twice
  int64_t live_tokens = 0;        // with activations at one time, at most
  int64_t carry_bytes = 0;        // K, V and their gradients between blocks, at most
  int64_t peak_bytes = 0;         // of the process during the first pass
  double loss = 0.0;
  double grad_norm = 0.0;
};

struct TrieBenchResult {
  Side on;
  Side off;
  double ratio = 0.0;      // median over pairs of time off / time on
  double ratio_low = 0.0;  // the smallest and the largest of the pairs
  double ratio_high = 0.0;
  double cpu_ratio = 0.0;    // of the processor times
  double ideal = 0.0;        // FLOPs off / FLOPs on
  double efficiency = 0.0;   // ratio / ideal
  bool auto_shares = false;  // what sharing.mode=auto decides, sharing.margin = 0.02
  double calibration_seconds = 0.0;
  int64_t samples = 0;
  int64_t logical_tokens = 0;
  int64_t unique_tokens = 0;
  int64_t pairs_on = 0;
  int64_t pairs_off = 0;
};

// FLOPs of a forward and backward pass.
double pass_flops(const models::ModelShape& shape,
                  int64_t tokens,
                  int64_t pairs,
                  int64_t head_rows);

TrieBenchResult bench_trie(models::CausalLM& model, const TrieBenchOptions& options);

}  // namespace banyan::bench
