// The run behind `banyan sft`, `banyan dpo` and `banyan reward-model`: load or resume, then step,
// validate, save and log until the last step.
#pragma once

#include "banyan/core/finetune_config.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/finetune_host.h"
#include "banyan/train/trainer.h"

namespace banyan::train {

// Throws [config] for a bad value and FileError for a bad model or checkpoint before anything is
// computed. A run that was killed and started again gives the bits of one that was not. `groups`:
// as train, of the mesh of finetune_mesh (train/finetune_layout.h); each rank is given all rows and
// computes its part of a batch.
TrainSummary finetune(const FinetuneConfig& config,
                      FinetuneHost& host,
                      parallel::Groups* groups = nullptr);

}  // namespace banyan::train
