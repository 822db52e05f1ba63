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

// A group must fit the pool by itself, one response at a time: 400 if it never can.
void check_fits(int32_t prompt_length, int32_t max_new, int32_t num_pages, int64_t page_bytes);

}  // namespace banyan::rollout
