#include "banyan/train/rollout_dump.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/train/unfinished.h"

namespace banyan::train {
namespace {

std::string file_of(const Config& config, int64_t step) {
  return *config.skip_rollout.dump_dir + "/" + std::to_string(step) + ".json";
}

// By row.
std::map<int64_t, UnfinishedGroup> read(const std::string& path) {
  std::map<int64_t, UnfinishedGroup> groups;
  for (UnfinishedGroup& group : unfinished_from_json(io::read_text(path), path)) {
    groups[group.row.row] = std::move(group);
  }
  return groups;
}

const Trajectory& find(const std::string& path, const UnfinishedGroup& group, int32_t index) {
  const auto found =
      std::find_if(group.ended.begin(), group.ended.end(), [&](const Trajectory& trajectory) {
        return trajectory.index == index;
      });
  BANYAN_CHECK(found != group.ended.end(),
               "[skip.rollout] ",
               path,
               ": wanted response ",
               index,
               " to row ",
               group.row.row,
               ", got ",
               group.ended.size(),
               " others; was it written with another rollout.n?");
  return *found;
}

}  // namespace

void check_rollout_dump(const Config& config) {
  const SkipRolloutConfig& skip = config.skip_rollout;
  if (!skip.enable) return;
  BANYAN_CHECK(skip.dump_dir,
               "[config] skip.rollout.dump_dir: wanted a folder with skip.rollout.enable=true, got "
               "null");
  BANYAN_CHECK(!skip.steps.empty(),
               "[config] skip.rollout.steps: wanted the steps to keep or to take, as [1,2,3], with "
               "skip.rollout.enable=true, got []");
  BANYAN_CHECK(config.rollout.over_sample_rate == 0.0,
               "[config] skip.rollout.enable: wanted false with rollout.over_sample_rate=",
               config.rollout.over_sample_rate,
               ", got true: which responses are cut off depends on the time they take");
}

bool has_rollout_dump(const Config& config, int64_t step) {
  const std::vector<int64_t>& steps = config.skip_rollout.steps;
  return config.skip_rollout.enable && std::find(steps.begin(), steps.end(), step) != steps.end();
}

bool is_rollout_kept(const Config& config, int64_t step) {
  return std::filesystem::exists(file_of(config, step));
}

void replay_rollout(const Config& config,
                    int64_t step,
                    const std::vector<rollout::Prompt>& prompts,
                    const rollout::OnFinished& on_finished,
                    rollout::GenerateStats& stats) {
  const std::string path = file_of(config, step);
  const std::map<int64_t, UnfinishedGroup> groups = read(path);
  for (const rollout::Prompt& prompt : prompts) {
    const auto found = groups.find(prompt.row);
    BANYAN_CHECK(found != groups.end() && found->second.row.tokens == prompt.tokens,
                 "[skip.rollout] ",
                 path,
                 ": wanted responses to the prompt of row ",
                 prompt.row,
                 ", got those to other prompts; was it written with other data, another data.seed "
                 "or another data.train_batch_size?");
    for (int32_t k = 0; k < prompt.n; ++k) {
      Trajectory trajectory = find(path, found->second, prompt.first_index + k);
      const auto length = static_cast<int64_t>(trajectory.response.size());
      BANYAN_CHECK(length <= config.rollout.response_length,
                   "[skip.rollout] ",
                   path,
                   ": wanted responses of at most data.max_response_length (",
                   config.rollout.response_length,
                   ") tokens, got ",
                   length);
      stats.logical_prompt_tokens += static_cast<int64_t>(prompt.tokens.size());
      stats.response_tokens += length;
      on_finished(std::move(trajectory));
    }
  }
}

void keep_rollout(const Config& config, int64_t step, const std::vector<Trajectory>& trajectories) {
  if (is_rollout_kept(config, step)) return;
  std::map<int64_t, UnfinishedGroup> by_row;
  for (const Trajectory& trajectory : trajectories) {
    UnfinishedGroup& group = by_row[trajectory.row];
    group.row = {trajectory.row, trajectory.prompt};
    group.ended.push_back(trajectory);
  }
  std::vector<UnfinishedGroup> groups;
  for (auto& [row, group] : by_row) groups.push_back(std::move(group));
  std::filesystem::create_directories(*config.skip_rollout.dump_dir);
  io::write_text_atomic(file_of(config, step), to_json(groups));
}

}  // namespace banyan::train
