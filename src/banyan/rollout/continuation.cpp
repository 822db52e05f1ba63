#include "banyan/rollout/continuation.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::rollout {

Request continuation(const Request& first, int32_t index, const std::vector<int32_t>& response) {
  const auto used = static_cast<int32_t>(response.size());
  if (used >= first.params.max_tokens) {
    throw RequestError(400,
                       "max_tokens",
                       detail::concat("[rollout] continuation: wanted fewer than max_tokens = ",
                                      first.params.max_tokens,
                                      " tokens so far, got ",
                                      used));
  }
  Request next = first;
  next.id.clear();
  next.n = 1;
  next.first_index = index;
  if (next.original_prompt == 0) next.original_prompt = static_cast<int32_t>(first.prompt.size());
  next.prompt.insert(next.prompt.end(), response.begin(), response.end());
  next.params.max_tokens -= used;
  next.params.min_tokens = std::max(0, next.params.min_tokens - used);
  next.params.prompt_logprobs = -1;
  return next;
}

void append_spans(const std::vector<WeightSpan>& more,
                  int32_t used,
                  std::vector<WeightSpan>& spans) {
  for (WeightSpan span : more) {
    span.start += used;
    span.end += used;
    // The epochs of two runs of the process do not mean the same.
    const bool goes_on = !spans.empty() && spans.back().epoch == span.epoch &&
                         spans.back().version == span.version && spans.back().end == span.start;
    if (goes_on) {
      spans.back().end = span.end;
    } else {
      spans.push_back(std::move(span));
    }
  }
}

}  // namespace banyan::rollout
