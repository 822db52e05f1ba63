// SamplingParams made ready once per request: what all responses of a group share. Immutable after
// construction, so any thread may read it. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/rollout/request.h"

namespace banyan::rollout {

// Temperatures below are greedy.
inline constexpr double kGreedyTemperature = 1e-5;

struct SamplingPlan {
  // params: passed by check_sampling (limits.h), max_tokens already cut to the room of the context.
  // prompt: all tokens before the responses. Those from `original_prompt` on (0: none) are the
  // response so far of a continuation: penalties, bad words, the grammar, repetition and stop
  // strings see them as response; max_tokens and min_tokens count new tokens only.
  // token_bytes: of every id, borrowed; read only where there are stop strings.
  // Throws RequestError 400 if the grammar does not accept a continuation's tokens.
  SamplingPlan(const SamplingParams& params,
               const std::vector<int32_t>& prompt,
               int32_t original_prompt,
               const std::vector<std::string>& token_bytes);

  SamplingParams params;
  const std::vector<std::string>* token_bytes;

  bool greedy;
  float inverse_temperature;  // 1 if greedy
  bool truncates;             // min_p, top_k or top_p cut something
  bool penalises;             // repetition, frequency or presence
  bool masks;                 // grammar or allowed ids: most of the vocabulary is barred
  bool edits;                 // the logits are changed at every token; min_tokens does so at first
  bool collects;              // likely tokens or the sampling mask are wanted beside the token

  std::vector<int32_t> past;           // prompt from original_prompt on
  std::vector<int32_t> prompt_tokens;  // distinct, ascending; only with a repetition penalty
  std::vector<int32_t> allowed;        // distinct, ascending
  std::vector<int32_t> end_ids;        // EOS unless ignored, and stop ids: distinct, ascending
  int32_t grammar_start = 0;           // state after `past`
  // KMP failure links of params.stop, one after the other; stop string i starts at
  // stop_offsets[i].
  std::vector<int32_t> stop_links;
  std::vector<int32_t> stop_offsets;
};

}  // namespace banyan::rollout
