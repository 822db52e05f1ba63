// FakeHost: the outside world for tests of the trainer. Prompts come from a list, rewards from a
// function, and everything logged is kept.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "banyan/core/host.h"

namespace banyan::testing {

class FakeHost final : public Host {
 public:
  using Reward = std::function<Score(const Trajectory&)>;

  FakeHost(std::vector<std::vector<int32_t>> prompts, Reward reward)
      : prompts_(std::move(prompts)), reward_(std::move(reward)) {}

  std::vector<PromptRow> next_prompts(int64_t num_rows) override {
    std::vector<PromptRow> rows;
    for (int64_t i = 0; i < num_rows && next_ != end_after; ++i) {
      const int64_t at = next_++;
      const int64_t row = at < static_cast<int64_t>(order.size())
                              ? order[at]
                              : at % static_cast<int64_t>(prompts_.size());
      rows.push_back({row, prompts_[row]});
    }
    return rows;
  }

  std::vector<PromptRow> validation_prompts() override {
    std::vector<PromptRow> rows;
    for (size_t i = 0; i < prompts_.size(); ++i)
      rows.push_back({static_cast<int64_t>(i), prompts_[i]});
    return rows;
  }

  void submit(const Trajectory& trajectory, bool) override {
    pending_.push_back(reward_(trajectory));
  }

  std::vector<Score> poll() override { return std::exchange(pending_, {}); }

  void on_samples(int64_t,
                  bool validation,
                  const std::vector<Trajectory>& trajectories,
                  const std::vector<Score>&) override {
    if (!validation) last_trajectories = trajectories;
  }

  Metrics validation_metrics(const std::vector<Trajectory>&,
                             const std::vector<Score>& scores) override {
    double sum = 0.0;
    for (const Score& score : scores) sum += score.value;
    return {{"val-core/reward/mean@1", sum / static_cast<double>(scores.size())}};
  }

  void log(int64_t step, const Metrics& metrics) override {
    logged[step].insert(metrics.begin(), metrics.end());
    if (stop_after >= 0 && step >= stop_after) stop_ = true;
  }
  void say(const std::string& line) override { said.push_back(line); }
  bool should_stop() override { return stop_; }
  void ask_to_stop() { stop_ = true; }
  std::string save_state() override { return std::to_string(next_); }
  void load_state(const std::string& state) override { next_ = std::stoll(state); }

  std::map<int64_t, Metrics> logged;  // by step
  std::vector<std::string> said;
  std::vector<Trajectory> last_trajectories;
  int64_t stop_after = -1;     // asks the trainer to stop once this step is logged
  int64_t end_after = -1;      // so many rows are all
  std::vector<int64_t> order;  // rows to give out first; then they go round

 private:
  std::vector<std::vector<int32_t>> prompts_;
  Reward reward_;
  std::vector<Score> pending_;
  int64_t next_ = 0;
  bool stop_ = false;
};

}  // namespace banyan::testing
