#include "banyan/rollout/request_check.h"

#include <algorithm>
#include <string>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/limits.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {
namespace {

constexpr size_t kMaxIdBytes = 512;
constexpr size_t kMaxSaltBytes = 4096;

template <typename... Parts>
[[noreturn]] void refuse(const char* param, const Parts&... parts) {
  throw RequestError(400, param, detail::concat("[rollout] ", parts...));
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
  at_least("max_undrained_tokens", options.max_undrained_tokens, 1);
}

void check_request(const Request& request, const RequestLimits& limits, const std::string& what) {
  check_prompt(request, limits, what);
  if (request.first_index < 0) {
    refuse("first_index", "first_index: wanted >= 0, got ", request.first_index);
  }
  if (request.id.size() > kMaxIdBytes) {
    refuse("request_id",
           "request_id: wanted at most ",
           kMaxIdBytes,
           " bytes, got ",
           request.id.size());
  }
  if (request.cache_salt.size() > kMaxSaltBytes) {
    refuse("cache_salt",
           "cache_salt: wanted at most ",
           kMaxSaltBytes,
           " bytes, got ",
           request.cache_salt.size());
  }
  check_sampling(request.params, request.n, limits.vocab, limits.num_known);
}

void check_fits(int32_t prompt_length, int32_t max_new, int32_t num_pages, int64_t page_bytes) {
  const int32_t needed = pages_of_one(prompt_length, std::max(max_new, 1));
  if (needed <= num_pages) return;
  refuse("prompt",
         "kv pool: a prompt of ",
         prompt_length,
         " tokens with ",
         max_new,
         " new ones can never fit: wanted ",
         needed * page_bytes,
         " bytes, got a pool of ",
         num_pages * page_bytes,
         " bytes; raise gpu_memory_utilization (or kv_bytes) or lower the number of new tokens");
}

}  // namespace banyan::rollout
