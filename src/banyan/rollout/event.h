// What comes out of the rollout engine: the tokens of one response since its last event, with their
// log-probabilities. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "banyan/core/sample.h"

namespace banyan::rollout {

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0.0f;
  int32_t rank = 0;  // 1 = likeliest
};

// One token that was drawn (rollout specification 8.2).
struct TokenRecord {
  int32_t token = 0;
  float raw = 0.0f;            // log_softmax(z)[token] at T = 1, before masks and penalties
  float processed = 0.0f;      // of the law that the token was drawn from
  float log_kept_mass = 0.0f;  // log of the share of softmax(z' / T) that the truncation kept; 0
                               // where nothing was cut
  std::vector<TokenLogprob>
      top;  // the token itself first, then the likeliest, then those asked for
  std::vector<int32_t> sampling_mask;  // ids that survived, only if asked for; empty: all
};

// Per prompt token, the first empty. Shared by the responses of a request; nobody changes it.
using PromptLogprobs = std::vector<std::vector<TokenLogprob>>;

struct Event {
  std::string request;  // Request::id
  int32_t index = 0;    // of the response
  std::vector<TokenRecord> tokens;
  bool finished = false;
  // The rest is set where `finished`.
  FinishReason finish = FinishReason::kStop;
  int32_t stop_token = -1;   // the stop_token_ids entry that ended it
  int32_t stop_string = -1;  // index into SamplingParams::stop
  std::string error;         // the response failed: what a user may read
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt, that were not computed for this group
  int32_t num_retractions = 0;
  double queue_seconds = 0.0;  // from its arrival to the first pass that computed for its group
  std::vector<WeightSpan> spans;
  std::shared_ptr<const PromptLogprobs> prompt_logprobs;  // null unless asked for
};

}  // namespace banyan::rollout
