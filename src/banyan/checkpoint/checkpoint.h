// Checkpoints: `<dir>/global_step_N/` is an ordinary HF directory (bf16) with `state/` beside the
// weights.
//
// state/manifest.json       {"format": 1, "step", "sequence", "files": {name: {"bytes", "sha256"}},
//                           "tensors": {name: {"global_shape", "offset", "file"}},
//                           "trainer": {"optimizer_steps", "skipped_in_a_row", "extra"},
//                           "sha256": of the compact text of the rest}
// state/master.safetensors  fp32 masters;  state/moments.safetensors  m.<name>, v.<name>;  no
// pickle anywhere.
// state/ahead.bin           the batch that was generated ahead of the step, if there was one
// critic/                   the same again for the critic of a run that has one; the outer manifest
//                           covers its files too, so both appear and verify together.
// Save: temporary folder -> write -> fsync -> rename -> `latest_checkpointed_iteration.txt` (temp +
// rename) -> only then are old ones deleted. Load: only a folder whose manifest and hashes verify.
// The newest is the one saved last (`sequence` counts the saves into a folder), not the one with
// the largest step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"
#include "banyan/parallel/groups.h"

namespace banyan::checkpoint {

// What the trainer must find again beside weights and moments; all counter-based, so a few integers
// do.
struct TrainerState {
  int64_t global_step = 0;
  int64_t skipped_in_a_row = 0;   // updates skipped for a non-finite norm, ending at this step
  std::string extra;              // JSON of the host: data loader position, anything it needs
  std::string unfinished;         // JSON of groups that a rollout cut off; empty: none
  std::string ahead;              // bytes: a batch that is generated already; empty: none
  std::optional<double> kl_coef;  // of an adaptive controller of the KL in the reward
};

// A second model that is trained in the run, borrowed.
struct Critic {
  models::CausalLM* model = nullptr;
  optim::AdamW* optimizer = nullptr;
  std::string config_from;  // only save reads it
};

// Writes `<dir>/global_step_N`; `config_from` is the HF directory whose config and tokenizer are
// copied. Throws FileError; the previous checkpoint is untouched then. Keeps the newest
// `max_to_keep` (0 = all). `critic` may be null. Over several ranks all of `groups` call it, with
// the moments gathered: the tensors are brought together where they lie in parts, and the first
// rank writes.
void save(const std::string& directory,
          models::CausalLM& model,
          optim::AdamW& optimizer,
          const TrainerState& state,
          const std::string& config_from,
          int64_t max_to_keep,
          const Critic* critic = nullptr,
          parallel::Groups* groups = nullptr);

struct Found {
  std::string path;                   // .../global_step_N
  std::vector<std::string> rejected;  // "<path>: <reason>" of newer ones that did not verify
};

// The newest checkpoint under `directory` whose manifest and hashes verify; nothing if there is
// none at all. Throws FileError with every reason if there are some and none verifies.
std::optional<Found> find_latest(const std::string& directory);

struct LoadOptions {
  const Critic* critic = nullptr;  // restored too; a checkpoint without one is refused then
  bool verified = false;           // find_latest has just compared every file with its hash
};

// Restores masters, moments and the optimizer's step count in place (bit for bit) and repacks. A
// model that holds parts of its tensors reads these, whatever the cut of the run that saved.
// Throws FileError, with models and optimizers untouched, if a file, name, shape or type is not the
// one wanted.
TrainerState load(const std::string& path,
                  models::CausalLM& model,
                  optim::AdamW& optimizer,
                  const LoadOptions& options = {});

}  // namespace banyan::checkpoint
