// Rollout correction (algorithms spec section 7; T29, T33, T34, T37): the law that sampled the
// tokens and the law that is trained differ by u = l_old - l_roll; importance weights make up for
// it and rejection drops what is too far off. Everything is fp64 and detached. Torch-free.
//
// Decoupled mode calls it once per batch. In bypass mode l_old is l_roll and u = l - l_roll: the
// trainer calls it on the log-probabilities of a pass without gradients over the whole mini-batch
// (T35).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/algo/advantage.h"
#include "banyan/algo/metric.h"

namespace banyan::algo {

struct CorrectionOptions {      // key below algorithm.rollout_correction
  std::string rollout_is = "";  // "", "token" or "sequence"
  std::string rollout_is_threshold =
      "";  // "C": truncate; "lo_hi": zero outside; wanted with rollout_is
  bool rollout_is_batch_normalize = false;
  std::string rollout_rs = "";            // "" or a comma list of rules
  std::string rollout_rs_threshold = "";  // one for all, or one per rule: "v" or (k1) "lo_hi"
};

struct CorrectionResult {
  PerToken weight;                         // [S][n_i]; 0 where rejected; empty without rollout_is
  std::vector<std::vector<uint8_t>> keep;  // [S][n_i]; empty without rollout_rs
  MetricMap metrics;                       // names of "rollout_corr/"
};

// l_roll is the law that sampled: renormalised over the tokens that top-k and top-p kept (T29).
CorrectionResult correction(const PerToken& old_log_prob,
                            const PerToken& rollout_log_prob,
                            const CorrectionOptions& options);

// Throws [algorithm.rollout_correction.*] for a wrong word or threshold.
void check_correction_options(const CorrectionOptions& options);

// True if weights or rejection are asked for.
inline bool corrects(const CorrectionOptions& options) {
  return !options.rollout_is.empty() || !options.rollout_rs.empty();
}

}  // namespace banyan::algo
