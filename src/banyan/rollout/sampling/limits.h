// What each sampling parameter may be (rollout specification 3.1, reliability specification 5): one
// table for the engine, the OpenAI routes and SGLang's /generate. Torch-free.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "banyan/rollout/request.h"

namespace banyan::rollout {

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct Range {
  double low;
  double high;  // kNoLimit: any finite number
};

struct Limit {
  // SamplingParams field, or "n". With ".count" the entries of a list, with ".bytes" the length of
  // each.
  const char* name;
  bool integer;
  bool above_low;  // low itself is out
  Range engine;
  Range openai;      // HTTP, vLLM's dialect
  Range sglang;      // HTTP, SGLang's dialect
  const char* note;  // what special values mean; may be empty
};

const std::vector<Limit>& sampling_limits();
// A bug if there is none of that name.
const Limit& sampling_limit(const std::string& name);
// "an integer >= 1", "a number in (0, 1]", ... with the note.
std::string describe(const Limit& limit, const Range& range);

// Throws RequestError 400 that names the field, what was wanted and what came. `vocab`: the model's
// ids are below it; `num_known`: the tokenizer's are below that, 0 if the engine has none.
void check_sampling(const SamplingParams& params, int32_t n, int64_t vocab, int64_t num_known);

}  // namespace banyan::rollout
