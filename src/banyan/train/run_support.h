// What every training run does around its steps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/core/host.h"

namespace banyan::train {

// The checkpoint to go on from: the newest whole one in `directory` (auto), `from_path`
// (resume_path), or none (disable). Newer ones that cannot be used are said. Throws [config] for
// another mode or a path that is missing, FileError as find_latest.
std::optional<checkpoint::Found> find_checkpoint(const std::string& resume_mode,
                                                 const std::optional<std::string>& from_path,
                                                 const std::string& directory,
                                                 RunHost& host);

// True at multiples of `every`; never for every <= 0.
bool due(int64_t every, int64_t step);

// Throws [update] once `skipped_in_a_row` updates reach banyan.max_nonfinite_steps.
void check_skipped(int64_t skipped_in_a_row, int64_t max_nonfinite_steps);

}  // namespace banyan::train
