// Host: the outside world as the core sees it. The Python shell implements it
// (python/bindings/host.cpp), testing/fake_host.h implements it for C++ tests. Every call comes
// from the training thread. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "banyan/core/sample.h"

namespace banyan {

struct PromptRow {
  int64_t row = 0;  // index of the row in its data set: part of the noise key, unique in a batch
  std::vector<int32_t> tokens;  // templated and tokenised
};

// Names are verl's ("actor/pg_loss"); units stand in docs/guides/metrics.md.
using Metrics = std::map<std::string, double>;

// What every training run asks of the outside world.
class RunHost {
 public:
  virtual ~RunHost() = default;

  virtual void log(int64_t step, const Metrics& metrics) = 0;
  // A line for the user ("[PS] ...", warnings): shown and kept in the run's log.
  virtual void say(const std::string& line) = 0;
  // True once the user asked to stop: the trainer saves and returns.
  virtual bool should_stop() = 0;

  // Position of the data loader, as JSON; must bring the next rows back to the same sequence.
  virtual std::string save_state() = 0;
  virtual void load_state(const std::string& state) = 0;
};

// The outside world of reinforcement learning: prompts out, trajectories in, scores back.
class Host : public RunHost {
 public:
  // The next `num_rows` training rows, in the loader's (seeded) order; fewer only at the end of the
  // data.
  virtual std::vector<PromptRow> next_prompts(int64_t num_rows) = 0;
  virtual std::vector<PromptRow> validation_prompts() = 0;

  // Hands a finished trajectory to the scorer and returns at once; scoring overlaps generation.
  virtual void submit(const Trajectory& trajectory, bool validation) = 0;
  // Waits for the scores of everything submitted and not yet collected. Ends in bounded time: a
  // scorer that crashes or hangs yields Score{failed = true, reason}.
  virtual std::vector<Score> poll() = 0;

  // What a reward model reads of each trajectory: by default prompt and response as they are; a
  // host whose reward model has another tokenizer gives that model's tokens of the same text.
  virtual std::vector<std::vector<int32_t>> reward_model_tokens(
      const std::vector<Trajectory>& trajectories, bool validation);

  // Sample texts for report and dumps: one call per step (or validation), after scoring.
  virtual void on_samples(int64_t step,
                          bool validation,
                          const std::vector<Trajectory>& trajectories,
                          const std::vector<Score>& scores) = 0;
  // Validation metrics ("val-core/...") of one validation pass, computed by the shell per data
  // source.
  virtual Metrics validation_metrics(const std::vector<Trajectory>& trajectories,
                                     const std::vector<Score>& scores) = 0;
};

inline std::vector<std::vector<int32_t>> Host::reward_model_tokens(
    const std::vector<Trajectory>& trajectories, bool) {
  std::vector<std::vector<int32_t>> out;
  for (const Trajectory& trajectory : trajectories) {
    out.push_back(trajectory.prompt);
    out.back().insert(out.back().end(), trajectory.response.begin(), trajectory.response.end());
  }
  return out;
}

}  // namespace banyan
