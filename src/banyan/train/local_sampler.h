// The ranks that train generate, each for its share of the prompts, one phase after the other.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "banyan/parallel/groups.h"
#include "banyan/train/sampler.h"
#include "banyan/train/sharded_model.h"

namespace banyan::train {

// Reads the weights of the actor where they lie as the rollout wants them: whole, or cut over the
// same ranks. Otherwise a second model without backward generates, whole or cut by the rollout's
// own keys, which is filled before it does and may give back its memory afterwards.
class LocalSampler final : public Sampler {
 public:
  // All are borrowed. `fsdp` is the actor's, or null.
  LocalSampler(const Config& config,
               Host& host,
               const GeneratorFactory& factory,
               parallel::Groups& groups,
               models::CausalLM& actor,
               parallel::Fsdp* fsdp);

  void begin(SamplerState from, const std::string& ahead) override;
  SampledBatch batch(int64_t step) override;
  RolloutResult validation(int64_t step) override;
  SamplerState state() override;
  bool should_stop() override;
  int64_t coming_bytes() const override;

 private:
  Generation generation();
  void hand_over_weights(int64_t version);
  void fill();
  void rest();
  bool drops_weights() const;

  const Config& config_;
  Host& host_;
  const GeneratorFactory& factory_;
  parallel::Groups& groups_;
  models::CausalLM& actor_;
  parallel::Fsdp* fsdp_;
  std::unique_ptr<models::CausalLM> own_;  // what generates in place of the actor; null: it does
  std::unique_ptr<FilledWeights> filled_;  // its weights
  std::unique_ptr<RewardModel> reward_model_;
  std::unique_ptr<rollout::Generator> generator_;
  int64_t handed_over_ = -1;  // step whose weights generate
  std::vector<UnfinishedGroup> unfinished_;
};

}  // namespace banyan::train
