// The folder that holds the checkpoints of a run: `global_step_N` for each, and names that start
// with `.tmp-` for what is being written or removed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace banyan::checkpoint {

struct Listed {
  int64_t step = 0;
  int64_t sequence = 0;  // of its manifest; the largest number if that cannot be read
  std::string path;
  std::string problem;  // why the manifest cannot be read; empty if it can
};

std::string step_path(const std::string& directory, int64_t step);
std::string temporary_path(const std::string& directory, int64_t step);

// Folders named global_step_N, newest (largest sequence, then step) first. Files are not verified.
std::vector<Listed> list_checkpoints(const std::string& directory);

// Makes the finished folder `temporary` appear as the checkpoint of `step`. One that is there
// already is replaced by exchanging the two, so that at every moment one of them has the name.
// Throws FileError.
void publish(const std::string& temporary, const std::string& directory, int64_t step);

// Removes what dead saves left behind.
void remove_leftovers(const std::string& directory);

// Renames all but the newest `max_to_keep` readable checkpoints (0 = all) to leftovers; other
// folders stay.
void remove_old(const std::string& directory, int64_t max_to_keep);

}  // namespace banyan::checkpoint
