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

}  // namespace banyan::train
