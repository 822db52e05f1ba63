// What every training run does around its steps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/core/host.h"
#include "banyan/models/causal_lm.h"
#include "banyan/parallel/collectives.h"
#include "banyan/train/token_budget.h"
#include "banyan/trie/cost_model.h"

namespace banyan::train {

// Threads and memory of this process, before it loads a model.
void set_up_process();

// Path of the checkpoint to go on from: the newest whole one in `directory` (auto), `from_path`
// (resume_path), or "" for none (disable). The first rank looks for all; newer ones that cannot be
// used are said. Throws [config] for another mode or a path that is missing, FileError as
// find_latest.
std::string find_checkpoint(const std::string& resume_mode,
                            const std::optional<std::string>& from_path,
                            const std::string& directory,
                            RunHost& host,
                            parallel::Collectives& ranks);

// calibrate_once in `directory` by the first rank, for all: they must plan alike. A model whose
// layers are cut over ranks is measured by all of them, by the clock of the first of each cut; of
// one in stages the first rank brings a whole one.
// False where other ranks hold layers or experts of the model.
bool holds_all(const models::CausalLM& model);

trie::CostModel calibrated_cost(models::CausalLM& model,
                                const std::string& directory,
                                parallel::Collectives& ranks);
// The same where the model may lie in parts or stages: of such a one the first rank measures
// another, whole one that `load` brings.
trie::CostModel calibrated_cost(models::CausalLM& model,
                                const std::function<std::unique_ptr<models::CausalLM>()>& load,
                                const std::string& directory,
                                parallel::Collectives& ranks);

// Of the rank that has most.
int64_t most(int64_t value, parallel::Collectives& ranks);

// What one of the processes of a run may take of the free memory. Those of a machine share its
// memory; those of other machines are counted too, which errs on the safe side.
int64_t free_bytes_of_rank(at::Device device, int64_t num_processes);

// token_budget_once for `model` in `directory`, chosen by the first rank for all. Beside what
// `left` says the probabilities that the vocabulary head keeps are set aside.
int64_t chosen_token_budget(const std::string& directory,
                            const std::string& role,
                            const std::string& key,
                            const models::CausalLM& model,
                            const MemoryLeft& left,
                            RunHost& host,
                            parallel::Collectives& ranks);

// True at multiples of `every`; never for every <= 0.
bool due(int64_t every, int64_t step);

// Throws [update] once `skipped_in_a_row` updates reach banyan.max_nonfinite_steps.
void check_skipped(int64_t skipped_in_a_row, int64_t max_nonfinite_steps);

}  // namespace banyan::train
