#include "banyan/rollout/request_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/limits.h"

namespace banyan::rollout {
namespace {

constexpr size_t kMaxIdBytes = 512;
constexpr size_t kMaxSaltBytes = 4096;

template <typename... Parts>
[[noreturn]] void refuse(const char* param, const Parts&... parts) {
  throw RequestError(400, param, detail::concat("[rollout] ", parts...));
}

// Ids stand in logs and headers: no control characters (C0, DEL, and C1 in UTF-8).
bool has_control(const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) return true;
    if (byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0) {
      return true;
    }
  }
  return false;
}

void check_label(const char* param, const std::string& text, size_t most) {
  if (text.size() > most) {
    refuse(param, param, ": wanted at most ", most, " bytes, got ", text.size());
  }
  if (has_control(text)) refuse(param, param, ": wanted no control characters, got some");
}

// "prompt 3 (row 17): wanted ..." or "prompt: wanted ...".
std::string start_of(const std::string& what) { return (what.empty() ? "prompt" : what) + ": "; }

void check_prompt(const Request& request, const RequestLimits& limits, const std::string& what) {
  const auto length = static_cast<int64_t>(request.prompt.size());
  const std::string start = start_of(what);
  if (length == 0) refuse("prompt", start, "wanted at least one token, got none");
  // A request that draws nothing may fill the context.
  const bool draws = request.params.max_tokens > 0;
  if (draws && length >= limits.max_len) {
    refuse("prompt",
           start,
           "wanted fewer than max_model_len = ",
           limits.max_len,
           " tokens, so that a response has room, got ",
           length);
  }
  if (length > limits.max_len) {
    refuse("prompt",
           start,
           "wanted at most max_model_len = ",
           limits.max_len,
           " tokens, got ",
           length);
  }
  if (!limits.chunked_prefill && length > limits.max_num_batched_tokens) {
    refuse("prompt",
           start,
           "wanted at most max_num_batched_tokens = ",
           limits.max_num_batched_tokens,
           " tokens without chunked prefill, got ",
           length,
           "; raise it or set enable_chunked_prefill");
  }
  for (int64_t i = 0; i < length; ++i) {
    if (request.prompt[i] >= 0 && request.prompt[i] < limits.vocab) continue;
    refuse("prompt",
           start,
           "wanted token ids in [0, ",
           limits.vocab,
           "), got ",
           request.prompt[i],
           " at position ",
           i);
  }
  if (request.original_prompt < 0 || request.original_prompt > length) {
    refuse("original_prompt",
           "original_prompt: wanted 0 .. ",
           length,
           " (the length of the prompt), got ",
           request.original_prompt);
  }
}

}  // namespace

void check_options(const EngineOptions& options) {
  const auto at_least = [](const char* name, auto value, auto low) {
    BANYAN_CHECK(value >= low, "[rollout] ", name, ": wanted >= ", low, ", got ", value);
  };
  at_least("max_num_seqs", options.max_num_seqs, 1);
  at_least("max_num_batched_tokens", options.max_num_batched_tokens, 1);
  BANYAN_CHECK(options.kv_bytes >= 0,
               "[rollout] kv_bytes: wanted >= 0 (0: a share of the free memory), got ",
               options.kv_bytes);
  BANYAN_CHECK(options.memory_share > 0.0 && options.memory_share <= 1.0,
               "[rollout] gpu_memory_utilization: wanted a share in (0, 1], got ",
               options.memory_share);
  BANYAN_CHECK(options.host_kv_bytes >= -1,
               "[rollout] host_kv_bytes: wanted >= 0, or -1 (as the device needs), got ",
               options.host_kv_bytes);
  BANYAN_CHECK(options.mem_fraction_static >= 0.0 && options.mem_fraction_static <= 1.0,
               "[rollout] mem_fraction_static: wanted a share in (0, 1], or 0 (not given), got ",
               options.mem_fraction_static);
  BANYAN_CHECK(options.max_model_len >= 0,
               "[rollout] max_model_len: wanted >= 0 (0: the model's), got ",
               options.max_model_len);
  at_least("long_prefill_token_threshold", options.long_prefill_token_threshold, 0);
  at_least("prefill_schedule_interval", options.prefill_schedule_interval, 1);
  BANYAN_CHECK(options.watermark >= 0.0 && options.watermark < 1.0,
               "[rollout] watermark: wanted a share in [0, 1), got ",
               options.watermark);
  BANYAN_CHECK(
      options.schedule_conservativeness > 0.0 && options.schedule_conservativeness <= 100.0,
      "[rollout] schedule_conservativeness: wanted a number in (0, 100], got ",
      options.schedule_conservativeness);
  at_least("max_num_queued_reqs", options.max_num_queued_reqs, 0);
  at_least("max_num_queued_tokens", options.max_num_queued_tokens, 0);
  at_least("max_undrained_bytes", options.max_undrained_bytes, 1);
}

void check_request(const Request& request, const RequestLimits& limits, const std::string& what) {
  check_prompt(request, limits, what);
  constexpr int64_t kMostIndices = int64_t{std::numeric_limits<int32_t>::max()} + 1;
  if (request.first_index < 0) {
    refuse("first_index", "first_index: wanted >= 0, got ", request.first_index);
  }
  if (int64_t{request.first_index} + request.n > kMostIndices) {
    refuse("first_index",
           "first_index: wanted first_index + n <= ",
           kMostIndices,
           ", got ",
           request.first_index,
           " and n = ",
           request.n);
  }
  check_label("request_id", request.id, kMaxIdBytes);
  check_label("group_id", request.group_id, kMaxIdBytes);
  check_label("source", request.source, kMaxIdBytes);
  if (request.cache_salt.size() > kMaxSaltBytes) {
    refuse("cache_salt",
           "cache_salt: wanted at most ",
           kMaxSaltBytes,
           " bytes, got ",
           request.cache_salt.size());
  }
  check_sampling(request.params, request.n, limits.vocab, limits.num_known);
}

void check_queue(const EngineOptions& options, const QueueState& queue, int64_t prompt_tokens) {
  // A place is free when a group has ended; nobody knows how long that takes before some have.
  const double retry_after = std::clamp(std::ceil(queue.seconds_per_group), 1.0, 60.0);
  const auto refuse_for_now = [&](const auto&... parts) {
    throw RequestError(
        503, "", detail::concat("[rollout] queue: wanted ", parts..., "; try again"), retry_after);
  };
  if (options.max_num_queued_reqs > 0 && queue.requests >= options.max_num_queued_reqs) {
    refuse_for_now("fewer than max_num_queued_reqs = ",
                   options.max_num_queued_reqs,
                   " waiting requests, got ",
                   queue.requests);
  }
  // A prompt that is longer than the limit may wait alone.
  const int64_t tokens = queue.prompt_tokens + prompt_tokens;
  if (options.max_num_queued_tokens > 0 && queue.prompt_tokens > 0 &&
      tokens > options.max_num_queued_tokens) {
    refuse_for_now("at most max_num_queued_tokens = ",
                   options.max_num_queued_tokens,
                   " waiting prompt tokens, got ",
                   tokens);
  }
}

}  // namespace banyan::rollout
