// Fills FinetuneConfig from the resolved tree (JSON text), the one place that does.
#pragma once

#include <string>

#include "banyan/core/finetune_config.h"

namespace banyan::train {

// Throws [config] "<key>: wanted <type>, got <value>" for a missing key or a wrong type.
FinetuneConfig finetune_config_from_json(const std::string& text);

}  // namespace banyan::train
