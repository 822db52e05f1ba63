// A response that was cut off (by an abort, a pause, or a weight update in between) goes on as a
// request whose prompt is the first one with the tokens so far. Its noise, penalties, grammar and
// stops see them as response, so under the same weights it ends as if nothing had happened.
// Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/rollout/request.h"

namespace banyan::rollout {

// The request that goes on with response `index` of `first` after `response`; its max_tokens and
// min_tokens are those of `first` less what was used. `first` may be a continuation itself. Throws
// RequestError 400 if nothing of the budget is left.
Request continuation(const Request& first, int32_t index, const std::vector<int32_t>& response);

// Adds `more`, the weight spans of the tokens from `used` on, to those before.
void append_spans(const std::vector<WeightSpan>& more,
                  int32_t used,
                  std::vector<WeightSpan>& spans);

}  // namespace banyan::rollout
