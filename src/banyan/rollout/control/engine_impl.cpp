#include "banyan/rollout/control/engine_impl.h"

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/rollout/control/memory_release.h"
#include "banyan/rollout/control/together.h"
#include "banyan/rollout/memory/kv_budget.h"

namespace banyan::rollout {
namespace {

int64_t max_len_of(const models::CausalLM& model, const EngineOptions& options) {
  const int64_t most = model.shape().max_positions;
  return options.max_model_len > 0 ? std::min(most, options.max_model_len) : most;
}

}  // namespace

Engine::Impl::Impl(models::CausalLM& model,
                   const EngineOptions& options,
                   std::vector<std::string> token_bytes)
    : model_(model),
      options_((check_options(options), options)),
      token_bytes_(std::move(token_bytes)),
      limits_{.vocab = model.shape().vocab,
              .max_len = max_len_of(model, options),
              .max_num_batched_tokens = options.max_num_batched_tokens,
              .chunked_prefill = options.enable_chunked_prefill,
              .num_known = static_cast<int64_t>(token_bytes_.size())},
      loop_(model, options_),
      events_([this] { publish(); }) {
  // An id beyond the tokenizer's (padding of the embedding) can be drawn, and has no text.
  if (!token_bytes_.empty() && limits_.num_known < limits_.vocab) {
    token_bytes_.resize(limits_.vocab);
  }
  figures_.version = loop_.version();
}

// A pass in progress is waited for: it borrows the model.
Engine::Impl::~Impl() {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    status_.stopping = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::string Engine::Impl::whom(double seconds) const {
  const std::unique_lock<std::mutex> lock(mutex_);
  return detail::concat("waited ",
                        seconds,
                        " s for the pass in progress (",
                        figures_.running,
                        " responses running, ",
                        figures_.waiting,
                        " waiting)");
}

Boundary::Hold Engine::Impl::hold(const char* call, const Deadline& deadline) {
  std::optional<Boundary::Hold> hold = boundary_.enter(deadline);
  if (hold) return std::move(*hold);
  throw RequestError(
      503, "", detail::concat("[rollout] ", call, ": ", whom(deadline.seconds())), 1.0);
}

void Engine::Impl::check_ready(const Status& status) const {
  if (status.weights_missing) {
    throw RequestError(
        409,
        "",
        "[rollout] weights_missing: the weights were given back (sleep level 2) or an "
        "update failed half-way; update them first");
  }
  if (status.asleep() && status.refuses) {
    throw RequestError(503, "", "[rollout] the engine is asleep; wake it first", 1.0);
  }
  if (status.flow != Flow::kFlowing && status.refuses) {
    throw RequestError(503, "", "[rollout] the engine is paused; resume it first", 1.0);
  }
}

int32_t Engine::Impl::room_for(const Request& request) const {
  const int64_t room = limits_.max_len - static_cast<int64_t>(request.prompt.size());
  return static_cast<int32_t>(std::clamp<int64_t>(room, 0, request.params.max_tokens));
}

std::vector<std::unique_ptr<Live>> Engine::Impl::lives_from(Request request,
                                                            Delivery& delivery) const {
  const int32_t max_new = room_for(request);
  std::vector<std::unique_ptr<Live>> out;
  if (!options_.share_prefix) {
    for (const int32_t n = std::exchange(request.n, 1); static_cast<int32_t>(out.size()) + 1 < n;) {
      out.push_back(std::make_unique<Live>(request, max_new, token_bytes_, delivery));
      ++request.first_index;
    }
  }
  out.push_back(std::make_unique<Live>(std::move(request), max_new, token_bytes_, delivery));
  return out;
}

// The figures are plain numbers, so a pass costs no allocation here unless something ended.
void Engine::Impl::publish() {
  const Scheduler& scheduler = loop_.scheduler();
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    figures_.running = scheduler.num_running();
    figures_.waiting = scheduler.num_waiting();
    figures_.groups_running = scheduler.num_groups_started();
    figures_.num_pages = scheduler.num_pages();
    figures_.used_pages = scheduler.num_used_pages();
    figures_.cached_pages = scheduler.num_cached_pages();
    figures_.idle = loop_.idle();
    figures_.queue = {scheduler.num_groups_queued(),
                      scheduler.num_queued_prompt_tokens(),
                      scheduler.seconds_per_group()};
    figures_.epoch = loop_.epoch();
    figures_.version = loop_.version();
    figures_.scheduler = scheduler.counters();
    figures_.loop = loop_.counters();
    figures_.seconds = loop_.seconds();
    for (const std::string& id : events_.ended_ids()) {
      const auto found = in_flight_.find(id);
      if (found != in_flight_.end() && --found->second == 0) in_flight_.erase(found);
    }
    events_.ended_ids().clear();
  }
  changed_.notify_all();
}

int32_t Engine::Impl::pages_within_budget(int64_t wanted) const {
  const ComputeOptions& compute = model_.options();
  const auto element = static_cast<int64_t>(c10::elementSize(compute.dtype));
  const int32_t own = pool_pages(wanted,
                                 loop_.page_bytes(),
                                 {.kv_bytes = options_.kv_bytes,
                                  .memory_share = options_.memory_share,
                                  .mem_fraction_static = options_.mem_fraction_static,
                                  .weight_bytes = model_.params().num_elements() * element},
                                 compute.device);
  return static_cast<int32_t>(least_together(model_, own));
}

void Engine::Impl::open_pool(const char* call) {
  check_free_memory(detail::concat("[rollout] ", call, ": kv_cache"),
                    -least_together(model_, -num_pages_ * loop_.page_bytes()),
                    least_together(model_, read_memory(model_.options().device).free));
  loop_.open_pool(num_pages_);
}

bool Engine::Impl::is_trained() const {
  const std::vector<Param>& params = model_.params().params();
  return std::any_of(
      params.begin(), params.end(), [](const Param& param) { return param.grad.defined(); });
}

EngineStats Engine::Impl::stats() const {
  const std::unique_lock<std::mutex> lock(mutex_);
  EngineStats stats;
  if (status_.asleep()) {
    stats.state = EngineState::kAsleep;
  } else if (status_.flow == Flow::kDraining || status_.pausing) {
    stats.state = EngineState::kPausing;
  } else if (status_.flow == Flow::kHalted) {
    stats.state = EngineState::kPaused;
  } else if (status_.started) {
    stats.state = EngineState::kRunning;
  }
  stats.running = figures_.running;
  stats.waiting = figures_.waiting;
  for (const std::unique_ptr<Live>& live : inbox_) {
    stats.waiting += static_cast<int32_t>(live->responses.size());
  }
  stats.groups_running = figures_.groups_running;
  stats.num_pages = figures_.num_pages;
  stats.used_pages = figures_.used_pages;
  stats.cached_pages = figures_.cached_pages;
  stats.weight_epoch = figures_.epoch;
  stats.weight_version = figures_.version;
  stats.weights_missing = status_.weights_missing;
  const SchedulerCounters& scheduler = figures_.scheduler;
  const LoopCounters& loop = figures_.loop;
  stats.counters = {{"admission_rejections", num_rejected_},
                    {"computed_prompt_tokens", scheduler.computed_prompt_tokens},
                    {"drain_waits", num_backlogs_},
                    {"dropped_groups", scheduler.dropped_groups},
                    {"evicted_pages", scheduler.evicted_pages},
                    {"finished_abort", loop.finished_abort},
                    {"finished_error", loop.finished_error},
                    {"finished_length", loop.finished_length},
                    {"finished_repetition", loop.finished_repetition},
                    {"finished_stop", loop.finished_stop},
                    {"generation_tokens", loop.generation_tokens},
                    {"pass_tokens", scheduler.pass_tokens},
                    {"passes", scheduler.passes},
                    {"preemptions", scheduler.preemptions},
                    {"prefix_attn_rows", loop.prefix_attn_rows},
                    {"prefix_cache_hits", scheduler.cached_prompt_tokens},
                    {"prefix_cache_queries", scheduler.prompt_tokens},
                    {"prompt_tokens", scheduler.prompt_tokens},
                    {"prompt_tokens_cached", scheduler.cached_prompt_tokens},
                    {"recomputed_tokens", scheduler.recomputed_tokens},
                    {"restored_pages", scheduler.restored_pages},
                    {"retractions", scheduler.retractions},
                    {"sibling_shared_tokens", scheduler.sibling_shared_tokens},
                    {"spilled_pages", scheduler.spilled_pages},
                    {"weight_updates", num_updates_}};
  stats.seconds = {{"deliver", figures_.seconds.deliver},
                   {"draw", figures_.seconds.draw},
                   {"forward", figures_.seconds.forward},
                   {"schedule", figures_.seconds.schedule}};
  return stats;
}

}  // namespace banyan::rollout
