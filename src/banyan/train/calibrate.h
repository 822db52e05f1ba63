// The cost model of this machine for this model, measured at start-up (specification A14).
//
// Two kinds of short runs, each fitted by non-negative least squares on relative errors:
//   attention alone, one layer, on a path, a fork and carried keys:
//     t = a_token tokens + a_pair pairs + a_fork forks (+ a_carry carried tokens)
//   passes of the whole model, forward and backward, less their layers' attention:
//     t = per_block + b_token tokens + per_head_row head rows
// so per_token = b_token + layers a_token, and so on. What a recomputed token costs is the share of
// the forward. The runs are sized by the first of them: within about `seconds` for a large model,
// milliseconds for a tiny one.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "banyan/models/causal_lm.h"
#include "banyan/trie/cost_model.h"

namespace banyan::train {

struct CalibrateOptions {
  double seconds = 1.5;           // time that the runs may take
  std::function<double()> clock;  // seconds; default: wall time
};

// Gradients are zero afterwards. The model must have been loaded with backward.
trie::CostModel calibrate(models::CausalLM& model, const CalibrateOptions& options = {});

// The cost model in `file` if it was measured with this model's shape, dtype, kernels, device and
// number of threads; else calibrates and writes it there. So a resumed run plans as before. A file
// that cannot be read or written is no error: it is measured again.
trie::CostModel calibrate_once(models::CausalLM& model, const std::string& file);

// Its two halves. `kept_cost` is nothing where it must be measured.
std::optional<trie::CostModel> kept_cost(const models::CausalLM& model, const std::string& file);
void keep_cost(const models::CausalLM& model, const std::string& file, const trie::CostModel& cost);

}  // namespace banyan::train
