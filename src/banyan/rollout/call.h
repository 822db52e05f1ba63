// One generate call: the scheduler plans a pass, the runner computes it, the drawer draws, ended
// responses leave. Pool and schedule live for one call, so nothing of the weights outlasts it and
// the memory is the trainer's again afterwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "banyan/rollout/engine.h"
#include "banyan/rollout/runner.h"
#include "banyan/rollout/sampling/token_drawer.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {

// A group and what its trajectories are called.
struct CallGroup {
  GroupRequest request;
  int64_t row = 0;
  int32_t first_index = 0;
};

class Call {
 public:
  // All references are borrowed; the groups have passed request_check.h. Throws RequestError if one
  // can never fit.
  Call(models::CausalLM& model,
       const EngineOptions& options,
       const SamplingParams& params,
       const OnFinished& on_finished,
       std::vector<CallGroup> groups,
       int32_t num_pages);

  // Everything but `seconds` of the statistics.
  GenerateStats run(const std::function<bool()>& should_stop);

 private:
  struct Logprobs {
    std::vector<float> full;     // one per token
    std::vector<float> sampled;  // of the truncated law; empty unless there is one
  };

  std::pair<int32_t, int32_t> children_of(const DrawRow& row) const;
  void draw(const at::Tensor& hidden, const std::vector<DrawRow>& rows);
  void take(int32_t group, int32_t child, const Drawn& drawn);
  void finish(int32_t group, int32_t child, FinishReason reason);
  void abort();

  const SamplingParams& params_;
  const OnFinished& on_finished_;
  Scheduler scheduler_;
  std::vector<CallGroup> groups_;                           // by the scheduler's ids
  std::vector<std::unique_ptr<const SamplingPlan>> plans_;  // likewise
  std::vector<std::vector<ResponseState>> responses_;       // and by child
  std::vector<std::vector<Logprobs>> logprobs_;             // likewise
  ops::KvPool kv_;
  Runner runner_;
  TokenDrawer drawer_;
  GenerateStats stats_;
  Pass pass_;  // reused, like the two below
  std::vector<DrawRequest> requests_;
  std::vector<Drawn> drawn_;
};

}  // namespace banyan::rollout
