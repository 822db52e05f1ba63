// What may be asked of the engine. Throws texts that name the field, what was wanted, what came:
// RequestError for requests, ValueError for options. The ranges of the sampling parameters are in
// sampling/limits.h.
#pragma once

#include <cstdint>
#include <string>

#include "banyan/rollout/engine.h"
#include "banyan/rollout/request.h"

namespace banyan::rollout {

void check_options(const EngineOptions& options);

// What a request is checked against.
struct RequestLimits {
  int64_t vocab = 0;
  int64_t max_len = 0;  // positions that prompt and response may take together
  int32_t max_num_batched_tokens = 0;
  bool chunked_prefill = true;
  int64_t num_known = 0;  // token ids whose bytes the engine has
};

// `what` names the request in the text: "prompt 3 (row 17)", or nothing.
void check_request(const Request& request, const RequestLimits& limits, const std::string& what);

inline constexpr int32_t kMaxResponses = 16384;  // of one request

// What waits, and how fast it goes.
struct QueueState {
  int64_t requests = 0;  // never admitted
  int64_t prompt_tokens = 0;
  double seconds_per_group = 0.0;  // Scheduler::seconds_per_group
};

// Whether one more request may wait (max_num_queued_reqs, max_num_queued_tokens): RequestError 503
// with the time after which a place should be free if not.
void check_queue(const EngineOptions& options, const QueueState& queue, int64_t prompt_tokens);

}  // namespace banyan::rollout
