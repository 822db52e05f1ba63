// What each sampling parameter may be (rollout specification 3.1): one table for the engine, the
// OpenAI routes and SGLang's /generate. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/request.h"

namespace banyan::rollout {

struct Range {
  double low;
  double high;             // infinity: any finite number
  bool above_low = false;  // low itself is out
};

struct Limit {
  const char* name;  // SamplingParams field, or "n"; of a list, how many entries: "stop.count"
  bool integer;
  Range engine;
  Range openai;      // HTTP in vLLM's dialect
  Range sglang;      // HTTP in SGLang's dialect
  const char* note;  // what special values mean; may be empty
};

const std::vector<Limit>& sampling_limits();
// Throws std::logic_error for an unknown name.
const Limit& sampling_limit(const char* name);

// Throws RequestError 400 that names the field, its range and what came. `vocab`: ids are below it;
// `has_token_bytes`: stop strings can be matched.
void check_sampling(const SamplingParams& params, int32_t n, int64_t vocab, bool has_token_bytes);

}  // namespace banyan::rollout
