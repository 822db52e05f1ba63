#include "banyan/train/run_support.h"

#include "banyan/core/error.h"

namespace banyan::train {

std::optional<checkpoint::Found> find_checkpoint(const std::string& resume_mode,
                                                 const std::optional<std::string>& from_path,
                                                 const std::string& directory,
                                                 RunHost& host) {
  if (resume_mode == "disable") return std::nullopt;
  if (resume_mode == "resume_path") {
    BANYAN_CHECK(from_path,
                 "[config] trainer.resume_from_path: wanted a checkpoint with "
                 "resume_mode=resume_path, got null");
    return checkpoint::Found{*from_path, {}};
  }
  BANYAN_CHECK(resume_mode == "auto",
               "[config] trainer.resume_mode: wanted auto, disable or resume_path, got '",
               resume_mode,
               "'");
  std::optional<checkpoint::Found> found = checkpoint::find_latest(directory);
  if (found) {
    for (const std::string& reason : found->rejected) host.say("checkpoint not used: " + reason);
  }
  return found;
}

bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

void check_skipped(int64_t skipped_in_a_row, int64_t max_nonfinite_steps) {
  BANYAN_CHECK(skipped_in_a_row < max_nonfinite_steps,
               "[update] ",
               skipped_in_a_row,
               " updates in a row had a non-finite loss or gradient norm "
               "(banyan.max_nonfinite_steps=",
               max_nonfinite_steps,
               "); the weights are those of the last finite one");
}

}  // namespace banyan::train
