// Where the samples of a run come from: the ranks that train generate them (train/local_sampler.h),
// or ranks that do nothing else (train/separate_rollout.h). A step sees no difference.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "banyan/train/sampling_stage.h"

namespace banyan::train {

// Makes what generates in place of the built-in engine. The model is borrowed and outlives it.
using GeneratorFactory =
    std::function<std::unique_ptr<rollout::Generator>(models::CausalLM& model)>;

// What generates for a run. Throws [config] where it cannot do what a key asks for.
std::unique_ptr<rollout::Generator> make_generator(const Config& config,
                                                   const GeneratorFactory& factory,
                                                   models::CausalLM& model);

// Where the samples stand between two steps.
struct SamplerState {
  std::string position;                     // of the host in the data; empty: at its start
  std::vector<UnfinishedGroup> unfinished;  // of rollouts (banyan.partial_rollout)
};

// Every call is made by all ranks that train.
class Sampler {
 public:
  virtual ~Sampler() = default;

  // Before all others: goes on from there. `ahead` is what ahead() gave then.
  virtual void begin(SamplerState from, const std::string& ahead) = 0;
  // The batch of a step, one after the other.
  virtual SampledBatch batch(int64_t step) = 0;
  // The validation rows, answered by the weights after `step`.
  virtual RolloutResult validation(int64_t step) = 0;
  // Behind the last batch.
  virtual SamplerState state() = 0;
  // The next batch, for a checkpoint, if it comes from older weights than those of now; "": none.
  virtual std::string ahead() { return ""; }
  // True once the user asked one of the ranks to stop.
  virtual bool should_stop() = 0;
  // Memory that it takes for the first batch and keeps from then on, beside the engine's pool.
  virtual int64_t coming_bytes() const { return 0; }
  // Nothing is asked for any more.
  virtual void end() {}

  // For handing over weights, since the last call.
  double take_hand_over_seconds() { return std::exchange(hand_over_seconds_, 0.0); }

 protected:
  double hand_over_seconds_ = 0.0;
};

}  // namespace banyan::train
