// What can be known to be wrong with a configuration before a model loads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/config.h"

namespace banyan::train {

// Steps of the whole run.
int64_t total_steps(const Config& config);

// Throws naming the key. Returns lines worth saying: choices that the configuration leaves open.
std::vector<std::string> check_config(const Config& config);

}  // namespace banyan::train
