// Groups that a rollout left unfinished (rollout.over_sample_rate) and that go on in a later step
// (banyan.partial_rollout): the responses that ended and the others as far as they came. They are
// scored when the group is whole. A response that goes on keeps its tokens and the
// log-probabilities of the weights that drew them; weight_spans say which those were.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "banyan/core/host.h"
#include "banyan/core/sample.h"
#include "banyan/rollout/generator.h"

namespace banyan::train {

struct UnfinishedGroup {
  PromptRow row;
  std::vector<Trajectory> ended;
  std::vector<Trajectory> cut;  // with finish = kAbort
};

// What is still to be generated of a group: one prompt for each response that was cut.
void add_prompts(const UnfinishedGroup& group, std::vector<rollout::Prompt>& prompts);

// A response as a whole: what was there, and what came to it under newer weights.
Trajectory joined(const Trajectory& cut, Trajectory more);

// The first and the last version of the weights that drew a trajectory; nothing where that is not
// known or no number.
struct WeightVersions {
  int64_t first = 0;
  int64_t last = 0;
};
std::optional<WeightVersions> weight_versions(const Trajectory& trajectory);

// For a checkpoint. from_json throws FileError starting with `where`.
std::string to_json(const std::vector<UnfinishedGroup>& groups);
std::vector<UnfinishedGroup> unfinished_from_json(const std::string& text,
                                                  const std::string& where);

}  // namespace banyan::train
