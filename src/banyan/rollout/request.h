// What goes into the rollout engine: a prompt, how many responses, and how they are sampled. The
// parameters are those of vLLM and SGLang under vLLM's names (docs/guides/rollout.md); limits and
// operator order stand with the code that obeys them in sampling/. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace banyan::rollout {

class TokenTable;  // sampling/token_table.h: structured output

// A pattern of tokens that repeats at the end of a response ends it (vLLM's repetition_detection).
// Off while max_pattern is 0.
struct RepetitionDetection {
  int32_t max_pattern = 0;  // tokens
  int32_t min_pattern = 1;
  int32_t min_count = 2;  // times that the pattern stands there
};

struct SamplingParams {
  double temperature = 1.0;                           // < 1e-5 is greedy
  double top_p = 1.0;                                 // (0, 1]
  int32_t top_k = -1;                                 // -1 or 0: off
  bool top_k_ties = false;                            // keep every token equal to the k-th (vLLM)
  double min_p = 0.0;                                 // [0, 1], relative to the largest probability
  double repetition_penalty = 1.0;                    // > 0; prompt and response
  double presence_penalty = 0.0;                      // [-2, 2]; response
  double frequency_penalty = 0.0;                     // [-2, 2]; response
  std::vector<std::pair<int32_t, float>> logit_bias;  // id, added to its logit; clamped to +-100
  std::vector<std::vector<int32_t>>
      bad_words;  // the last token of each is barred where the others precede it
  std::vector<int32_t> allowed_token_ids;     // empty: all
  std::shared_ptr<const TokenTable> grammar;  // null: free text

  int32_t max_tokens = 0;  // new tokens, >= 1; 0 scores the prompt only (with prompt_logprobs)
  int32_t min_tokens = 0;  // EOS and stops are not looked at before
  std::vector<int32_t> eos_ids;         // of the model: end the response, stop_reason none
  std::vector<int32_t> stop_token_ids;  // of the request: likewise, and are its stop_reason
  std::vector<std::string> stop;  // bytes; matched across token borders, needs Engine's token bytes
  bool ignore_eos = false;        // eos_ids are not looked at
  RepetitionDetection repetition_detection;

  uint64_t seed = 0;
  uint64_t step = 0;  // part of the noise key (training)

  int32_t top_logprobs =
      -1;  // so many likeliest tokens beside the one drawn; -1: none; kAllTokens: vocabulary
  std::vector<int32_t> logprob_token_ids;  // and these
  int32_t prompt_logprobs = -1;  // the same for the tokens of the prompt; bypasses the prefix cache
  bool return_sampling_mask = false;  // ids that survived the truncation, per token
  bool processed_logprobs = false;    // `top` shows the law that was drawn from, else the raw one
};

inline constexpr int32_t kAllTokens = 1 << 30;

// One prompt and its n responses: a group.
struct Request {
  std::string id;  // unique among those in flight; empty: the engine makes one
  std::vector<int32_t> prompt;
  int32_t n = 1;
  SamplingParams params;
  // Noise is keyed by (seed, step, row, index) in training; with row < 0 by (seed + index, digest
  // of the prompt).
  int64_t row = -1;
  int32_t first_index = 0;  // index of the first response
  int32_t original_prompt =
      0;  // leading tokens that make the digest; 0: all. A continuation gives its first prompt's
  int32_t priority = 0;    // lower first (scheduling_policy = priority)
  std::string cache_salt;  // prefixes are shared under equal salts only
  std::string source;      // data source: response lengths are learned per source
  // Requests with an equal one that come within two seconds are scheduled as one group
  // (scheduling_policy = group): one place in the queue, admitted together where their pages fit,
  // one seniority. They share their pages by equal tokens, as all do. Empty: by itself.
  std::string group_id;
};

// A request that cannot be taken: code 400 (it never can), 409 (not in this state), 503 (not now).
// `param` names the parameter at fault, empty if there is none. Python: banyan._C.RequestError with
// the same attributes.
class RequestError : public std::invalid_argument {
 public:
  RequestError(int code, std::string param, const std::string& message, double retry_after = 0.0)
      : std::invalid_argument(message),
        code(code),
        param(std::move(param)),
        retry_after(retry_after) {}
  int code;
  std::string param;
  double retry_after;  // seconds; 0: unknown
};

}  // namespace banyan::rollout
