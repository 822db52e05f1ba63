// The one function that fills the core's configuration from the resolved tree (JSON text of verl's
// keys, plus a node "_shell" with what only the shell can know).
#pragma once

#include <string>

#include "banyan/core/config.h"
#include "banyan/train/config_node.h"

namespace banyan::train {

// Throws [config] "<key>: wanted <type>, got <value>" for a missing key or a wrong type.
Config config_from_json(const std::string& text);

// Parts that the trees of other trainers hold too.
void read_optim(const ConfigNode& node, OptimConfig& optim);
void read_fsdp(const ConfigNode& node, FsdpConfig& fsdp);
void read_megatron(const ConfigNode& node, MegatronConfig& megatron);
void read_stages(const ConfigNode& node, StagesConfig& stages);
void read_sharing(const ConfigNode& node, SharingConfig& sharing);

// What every trainer has in its node `trainer`.
template <typename Trainer>
void read_any_trainer(const ConfigNode& node, Trainer& trainer) {
  node.read("total_epochs", trainer.total_epochs);
  node.read("total_training_steps", trainer.total_training_steps);
  node.read("save_freq", trainer.save_freq);
  node.read("test_freq", trainer.test_freq);
  node.read("val_before_train", trainer.val_before_train);
  node.read("default_local_dir", trainer.default_local_dir);
  node.read("resume_mode", trainer.resume_mode);
  node.read("resume_from_path", trainer.resume_from_path);
  node.read("device", trainer.device);
}

}  // namespace banyan::train
