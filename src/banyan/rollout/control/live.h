// A request in the engine, its responses, and who is told what comes of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "banyan/core/rng.h"
#include "banyan/rollout/control/outbox.h"
#include "banyan/rollout/event.h"
#include "banyan/rollout/request.h"
#include "banyan/rollout/sampling/response_state.h"
#include "banyan/rollout/sampling/sampling_plan.h"
#include "banyan/rollout/sampling/token_drawer.h"
#include "banyan/rollout/schedule/sequence.h"

namespace banyan::rollout {

struct Response {
  ResponseState state;
  NoiseKey key;
  int32_t index = 0;                   // as the request numbers it
  std::vector<WeightSpan> spans = {};  // labels are filled in at the end
  bool ended = false;
  // A trainer's log-probabilities; a server sends them off at once.
  std::vector<float> logprobs = {};
  std::vector<float> sampled_logprobs = {};  // only where something is cut off
  Outbox::Writer::Slot slot = {};
};

class Delivery;

// One group of the scheduler.
struct Live {
  // `request` has passed request_check.h; max_new: tokens that there is room for. Throws
  // RequestError 400 where the grammar does not take a continuation's tokens.
  Live(Request request,
       int32_t max_new,
       const std::vector<std::string>& token_bytes,
       Delivery& delivery);
  Live(const Live&) = delete;  // responses point to the plan
  Live& operator=(const Live&) = delete;

  std::string id;
  int64_t row = -1;
  int32_t prompt_length = 0;
  SamplingPlan plan;
  Delivery& delivery;
  GroupRequest wanted;  // until the scheduler takes it
  int32_t group = -1;   // the scheduler's number
  std::vector<Response> responses;
  int32_t num_ended = 0;
  std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();
  std::optional<double> queue_seconds;  // once a pass computed for it
  // Null unless asked for. From the first end on readers have it, so it does not change any more: a
  // prompt that must be computed again has the scores that it had.
  std::shared_ptr<PromptLogprobs> prompt_logprobs;
};

// How a response ended.
struct Outcome {
  FinishReason reason = FinishReason::kAbort;
  int32_t stop_token = -1;
  int32_t stop_string = -1;
  std::string error = {};  // it failed
  const std::vector<int32_t>* prompt = nullptr;
  const std::vector<int32_t>* tokens = nullptr;  // of the response
  int32_t cached_tokens = 0;
  int32_t num_retractions = 0;
  double queue_seconds = 0.0;
};

// Whoever asked. Called with the boundary held.
class Delivery {
 public:
  virtual ~Delivery() = default;
  // Around the tokens and ends of one pass, or the ends that a control call causes.
  virtual void begin() {}
  virtual void end() {}
  // `drawn` may be emptied.
  virtual void token(const Live& live, Response& response, Drawn& drawn) = 0;
  virtual void ended(const Live& live, Response& response, const Outcome& outcome) = 0;
};

}  // namespace banyan::rollout
