// What the trainer asks of a rollout: responses to prompts, and to know when the weights change.
// The engine of this folder is one; a server of vLLM or SGLang behind the shell's driver is
// another.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/rollout/request.h"

namespace banyan::rollout {

struct Prompt {
  int64_t row = 0;              // part of the noise key; trajectories carry it
  std::vector<int32_t> tokens;  // at least one
  int32_t n = 1;                // responses
  int32_t first_index = 0;      // index of the first response, the others follow
  // A continuation: `tokens` are a prompt of this length and a response so far. It counts against
  // max_tokens; the trajectory that comes back has all of `tokens` as its prompt. 0: none.
  int32_t original_prompt = 0;
};

struct GenerateStats {
  int64_t logical_prompt_tokens = 0;   // prompt tokens of all sequences
  int64_t computed_prompt_tokens = 0;  // prompt tokens that went through the model
  int64_t response_tokens = 0;
  int64_t num_passes = 0;  // forward passes
  int64_t num_preemptions = 0;
  double seconds = 0.0;
};

// Called on the generating thread as each trajectory ends.
using OnFinished = std::function<void(Trajectory&&)>;

class Generator {
 public:
  virtual ~Generator() = default;

  // Generates every response of every prompt; returns when all have ended. Throws RequestError
  // before any work for what can never be generated. `should_stop` is asked between passes; true
  // ends the call, unfinished trajectories come back with FinishReason::kAbort.
  virtual GenerateStats generate(const std::vector<Prompt>& prompts,
                                 const SamplingParams& params,
                                 const OnFinished& on_finished,
                                 const std::function<bool()>& should_stop) = 0;

  // Whether Prompt::original_prompt is understood.
  virtual bool can_continue() const { return false; }

  // The trainer's weights have changed: nothing that was computed from the old ones may be used
  // again. `version` counts the updates. Bounded in time: throws with what it waited for.
  virtual void weights_changed(int64_t version) = 0;
};

}  // namespace banyan::rollout
