#include "banyan/rollout/sampling/limits.h"

#include <algorithm>
#include <cmath>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/sampling_plan.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

constexpr double kMaxInt = std::numeric_limits<int32_t>::max();

template <typename... Parts>
[[noreturn]] void refuse(const std::string& param, const Parts&... parts) {
  throw RequestError(400, param, detail::concat("[rollout] ", param, ": wanted ", parts...));
}

void check(const char* name, double value) {
  const Limit& limit = sampling_limit(name);
  const Range& range = limit.engine;
  const bool fits = std::isfinite(value) && value <= range.high &&
                    (limit.above_low ? value > range.low : value >= range.low);
  if (fits) return;
  const std::string field = std::string(name).substr(0, std::string(name).find('.'));
  refuse(field, describe(limit, range), ", got ", value);
}

void check_ids(const char* name, const std::vector<int32_t>& ids, int64_t vocab) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab) refuse(name, "token ids in [0, ", vocab, "), got ", id);
  }
}

void check_bias(const SamplingParams& params, int64_t vocab) {
  for (const auto& [id, bias] : params.logit_bias) {
    if (id < 0 || id >= vocab) refuse("logit_bias", "token ids in [0, ", vocab, "), got ", id);
    if (!std::isfinite(bias)) {
      refuse("logit_bias", "finite numbers (clamped to +-100), got ", bias, " for token ", id);
    }
  }
}

void check_stops(const SamplingParams& params, bool has_token_bytes) {
  check("stop.count", static_cast<double>(params.stop.size()));
  for (const std::string& stop : params.stop) {
    check("stop.bytes", static_cast<double>(stop.size()));
  }
  if (!params.stop.empty() && !has_token_bytes) {
    refuse("stop", "an engine that knows the bytes of its tokens, got one without a tokenizer");
  }
}

void check_repetition(const RepetitionDetection& detection) {
  check("repetition_detection.max_pattern", detection.max_pattern);
  if (detection.max_pattern == 0) return;
  check("repetition_detection.min_pattern", detection.min_pattern);
  check("repetition_detection.min_count", detection.min_count);
  if (detection.min_pattern > detection.max_pattern) {
    refuse("repetition_detection",
           "min_pattern <= max_pattern = ",
           detection.max_pattern,
           ", got ",
           detection.min_pattern);
  }
}

void check_lengths(const SamplingParams& params) {
  check("max_tokens", params.max_tokens);
  check("min_tokens", params.min_tokens);
  if (params.max_tokens == 0 && params.prompt_logprobs < 0) {
    refuse("max_tokens", ">= 1 new token (0 only scores a prompt, with prompt_logprobs), got 0");
  }
  if (params.min_tokens > params.max_tokens) {
    refuse("min_tokens", "<= max_tokens = ", params.max_tokens, ", got ", params.min_tokens);
  }
}

void check_logprobs(const SamplingParams& params, int64_t vocab) {
  if (params.top_logprobs != kAllTokens) check("top_logprobs", params.top_logprobs);
  if (params.prompt_logprobs != kAllTokens) check("prompt_logprobs", params.prompt_logprobs);
  check("logprob_token_ids.count", static_cast<double>(params.logprob_token_ids.size()));
  check_ids("logprob_token_ids", params.logprob_token_ids, vocab);
}

}  // namespace

const std::vector<Limit>& sampling_limits() {
  // name, integer, above_low, engine, openai, sglang, note
  static const std::vector<Limit> limits = {
      {"temperature", false, false, {0, kNoLimit}, {0, 2}, {0, kNoLimit}, "below 1e-5: greedy"},
      {"top_p", false, true, {0, 1}, {0, 1}, {0, 1}, "1: off"},
      {"top_k", true, false, {-1, kMaxInt}, {-1, kMaxInt}, {-1, kMaxInt}, "-1 or 0: off"},
      {"min_p", false, false, {0, 1}, {0, 1}, {0, 1}, "0: off"},
      {"repetition_penalty", false, true, {0, kNoLimit}, {0, kNoLimit}, {0, 2}, "1: off"},
      {"presence_penalty", false, false, {-2, 2}, {-2, 2}, {-2, 2}, "0: off"},
      {"frequency_penalty", false, false, {-2, 2}, {-2, 2}, {-2, 2}, "0: off"},
      {"n", true, false, {1, 16384}, {1, 128}, {1, 128}, ""},
      {"max_tokens", true, false, {0, kMaxInt}, {0, kMaxInt}, {0, kMaxInt}, ""},
      {"min_tokens", true, false, {0, kMaxInt}, {0, kMaxInt}, {0, kMaxInt}, ""},
      {"seed", true, false, {-0x1p63, 0x1p63}, {-0x1p63, 0x1p63}, {-0x1p63, 0x1p63}, "-1: any"},
      {"top_logprobs", true, false, {-1, kMaxInt}, {-1, 20}, {-1, 20}, "-1: none"},
      {"prompt_logprobs", true, false, {-1, kMaxInt}, {-1, 20}, {-1, 20}, "-1: none"},
      {"logprob_token_ids.count", true, false, {0, 4096}, {0, 128}, {0, 128}, ""},
      {"logit_bias.count", true, false, {0, kMaxInt}, {0, 300}, {0, 300}, ""},
      {"bad_words.count", true, false, {0, 4096}, {0, 128}, {0, 128}, ""},
      {"allowed_token_ids.count", true, false, {0, kMaxInt}, {0, kMaxInt}, {0, kMaxInt}, ""},
      {"stop_token_ids.count", true, false, {0, 4096}, {0, 128}, {0, 128}, ""},
      {"stop.count", true, false, {0, 64}, {0, 16}, {0, 32}, ""},
      {"stop.bytes", true, false, {1, 4096}, {1, 256}, {1, 256}, "bytes of each string"},
      {"repetition_detection.max_pattern", true, false, {0, 1024}, {0, 256}, {0, 256}, "0: off"},
      {"repetition_detection.min_pattern", true, false, {1, 1024}, {1, 256}, {1, 256}, ""},
      {"repetition_detection.min_count", true, false, {2, 1024}, {2, 256}, {2, 256}, ""},
  };
  return limits;
}

const Limit& sampling_limit(const std::string& name) {
  const auto& limits = sampling_limits();
  const auto found = std::find_if(
      limits.begin(), limits.end(), [&](const Limit& limit) { return limit.name == name; });
  BANYAN_ASSERT(found != limits.end(), "no sampling limit is called ", name);
  return *found;
}

std::string describe(const Limit& limit, const Range& range) {
  const bool bounded = range.high < (limit.integer ? kMaxInt : kNoLimit);
  const std::string name = limit.name;
  std::string text = limit.integer ? "an integer" : "a number";
  if (name.ends_with(".count")) text = "a number of entries";
  if (name.ends_with(".bytes")) text = "a length";
  if (bounded) {
    text += detail::concat(limit.above_low ? " in (" : " in [", range.low, ", ", range.high, "]");
  } else {
    if (!limit.integer) text = "a finite number";
    text += detail::concat(limit.above_low ? " > " : " >= ", range.low);
  }
  if (*limit.note != '\0') text += detail::concat(" (", limit.note, ")");
  return text;
}

void check_sampling(const SamplingParams& params, int32_t n, int64_t vocab, int64_t num_known) {
  check("n", n);
  check("temperature", params.temperature);
  check("top_p", params.top_p);
  check("top_k", params.top_k);
  check("min_p", params.min_p);
  check("repetition_penalty", params.repetition_penalty);
  check("presence_penalty", params.presence_penalty);
  check("frequency_penalty", params.frequency_penalty);
  check_bias(params, vocab);
  check("bad_words.count", static_cast<double>(params.bad_words.size()));
  for (const std::vector<int32_t>& word : params.bad_words) {
    if (word.empty()) refuse("bad_words", "at least one token for each word, got none");
    check_ids("bad_words", word, vocab);
  }
  check_ids("allowed_token_ids", params.allowed_token_ids, vocab);
  if (params.grammar && params.grammar->max_token() >= vocab) {
    refuse("grammar",
           "a token table made for a vocabulary of ",
           vocab,
           " ids, got token ",
           params.grammar->max_token());
  }
  check_lengths(params);
  check_ids("eos_ids", params.eos_ids, vocab);
  check("stop_token_ids.count", static_cast<double>(params.stop_token_ids.size()));
  check_ids("stop_token_ids", params.stop_token_ids, num_known > 0 ? num_known : vocab);
  check_stops(params, num_known > 0);
  check_repetition(params.repetition_detection);
  check_logprobs(params, vocab);
}

}  // namespace banyan::rollout
