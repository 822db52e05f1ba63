// What is learned from a batch of examples: SFT, preferences (DPO, IPO) or a reward model. An
// objective plans the samples of a batch, walks the plan and says what it measured; the order of
// batches, the optimizer and everything outside belong to finetune.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "banyan/algo/metric.h"
#include "banyan/core/finetune_config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/finetune_host.h"
#include "banyan/train/layout.h"

namespace banyan::train {

struct BatchResult {
  double loss = 0.0;        // these examples' share of the batch's mean
  double weight = 0.0;      // N of the batch: scored tokens (SFT), or pairs
  algo::MetricMap metrics;  // "rewards/margins", ...
  int64_t logical_tokens = 0;
  int64_t unique_tokens = 0;
  int64_t computed_tokens = 0;  // replayed and recomputed ones included
  std::vector<std::string> warnings;
};

class Objective {
 public:
  virtual ~Objective() = default;

  // N, over which the loss of a batch is a mean.
  virtual double weight(const std::vector<Example>& batch) const = 0;
  // Adds the gradients of the batch's loss to the model. `rows` name the examples in their data, of
  // a batch of `weight`; they may be none where ranks walk together.
  virtual BatchResult train(const std::vector<int64_t>& rows,
                            std::vector<Example> examples,
                            double weight) = 0;
  // The same figures without gradients, on validation rows.
  virtual BatchResult score(const std::vector<int64_t>& rows,
                            std::vector<Example> examples,
                            double weight) = 0;
};

// The model is borrowed; the cost model of `layout` decides sharing.mode=auto and cuts. `host`
// gives the rows that a reference model scores before training, which is laid out over `groups` as
// the model is. Throws [preference] for a bad option before another model is loaded.
std::unique_ptr<Objective> make_objective(const FinetuneConfig& config,
                                          const Layout& layout,
                                          models::CausalLM& model,
                                          FinetuneHost& host,
                                          parallel::Groups& groups);

// How the model of `config` is loaded: compute type, and the head of the objective.
models::LoadOptions finetune_load_options(const FinetuneConfig& config,
                                          std::vector<std::string>* notes);

}  // namespace banyan::train
