// A trainer's call: a whole batch of prompts through the loop, in the caller's thread.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "banyan/core/error.h"
#include "banyan/rollout/control/engine_impl.h"
#include "banyan/rollout/memory/kv_budget.h"
#include "banyan/rollout/memory/prefix_tree.h"

namespace banyan::rollout {
namespace {

// A halted call looks whether it should stop.
constexpr std::chrono::milliseconds kLookAgain{50};

std::string name_of(const std::vector<Prompt>& prompts, size_t i) {
  return detail::concat("prompt ", i, " (row ", prompts[i].row, ")");
}

// Pages with which nothing ever waits: every trunk, and max_num_seqs of the longest children.
int64_t pages_wanted(const std::vector<std::unique_ptr<Live>>& lives,
                     bool share,
                     int32_t max_num_seqs) {
  PagePool no_pages(0);
  PrefixTree tree(no_pages, share);
  int64_t num_responses = 0;
  int64_t own = 0;
  for (const std::unique_ptr<Live>& live : lives) {
    const GroupRequest& wanted = live->wanted;
    tree.insert(wanted.prompt, wanted.salt);
    num_responses += wanted.n;
    const int32_t length = live->prompt_length;
    own = std::max<int64_t>(own, pages_of_one(length, wanted.max_new) - pages_for(length));
  }
  return tree.num_nodes() + own * std::min<int64_t>(num_responses, max_num_seqs);
}

// The work of one call, as differences of what the loop counts.
struct Start {
  explicit Start(const Loop& loop)
      : scheduler(loop.scheduler().counters()), tokens(loop.counters().generation_tokens) {}

  GenerateStats since(const Loop& loop) const {
    const SchedulerCounters& now = loop.scheduler().counters();
    GenerateStats stats;
    stats.computed_prompt_tokens = now.computed_prompt_tokens - scheduler.computed_prompt_tokens;
    stats.num_passes = now.passes - scheduler.passes;
    stats.num_preemptions = now.preemptions - scheduler.preemptions;
    stats.response_tokens = loop.counters().generation_tokens - tokens;
    return stats;
  }

  SchedulerCounters scheduler;
  int64_t tokens;
};

}  // namespace

std::vector<Request> Engine::Impl::requests_from(const std::vector<Prompt>& prompts,
                                                 const SamplingParams& params) const {
  std::vector<Request> requests;
  requests.reserve(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Prompt& prompt = prompts[i];
    Request& request = requests.emplace_back();
    request.prompt = prompt.tokens;
    request.n = prompt.n;
    request.params = params;
    request.row = prompt.row;
    request.first_index = prompt.first_index;
    request.original_prompt = prompt.original_prompt;
    if (prompt.original_prompt > 0) {
      const auto used = static_cast<int32_t>(prompt.tokens.size()) - prompt.original_prompt;
      BANYAN_CHECK(used >= 0 && used < params.max_tokens,
                   "[rollout] ",
                   name_of(prompts, i),
                   ": wanted fewer than max_tokens = ",
                   params.max_tokens,
                   " tokens of the response so far, got ",
                   used);
      request.params.max_tokens -= used;
      request.params.min_tokens = std::max(0, params.min_tokens - used);
    }
    BANYAN_CHECK(prompt.n >= 1 && prompt.n <= kMaxResponses,
                 "[rollout] ",
                 name_of(prompts, i),
                 ": wanted n in [1, ",
                 kMaxResponses,
                 "] responses, got ",
                 prompt.n);
    check_request(request, limits_, name_of(prompts, i));
  }
  return requests;
}

// One call at a time, and none beside a server.
void Engine::Impl::enter_generate() {
  const std::unique_lock<std::mutex> lock(mutex_);
  if (status_.started || status_.generating) {
    throw RequestError(409,
                       "",
                       detail::concat("[rollout] generate: ",
                                      status_.started ? "the engine serves requests (start)"
                                                      : "another generate call is running"));
  }
  if (status_.weights_missing) check_ready(status_);
  if (status_.asleep() || status_.flow != Flow::kFlowing) {
    throw RequestError(409,
                       "",
                       detail::concat("[rollout] generate: the engine is ",
                                      status_.asleep() ? "asleep; wake" : "paused; resume",
                                      " it first"));
  }
  status_.generating = true;
  abort_all_ = false;
  aborts_.clear();
}

// Whatever happened in the call.
void Engine::Impl::leave_generate() noexcept {
  {
    const Boundary::Hold held = boundary_.enter_pass();
    loop_.abort([](const Live&) { return true; });
    loop_.close_queue(false);
    if (!options_.keep_pool) loop_.take_pool();
    publish();
  }
  const std::unique_lock<std::mutex> lock(mutex_);
  status_.generating = false;
  changed_.notify_all();
}

void Engine::Impl::open_pool_for(const std::vector<std::unique_ptr<Live>>& lives) {
  int64_t wanted = pages_wanted(lives, options_.share_prefix, options_.max_num_seqs);
  // A pool that stays must do for later calls too.
  if (options_.keep_pool) wanted = std::max(wanted, most_pages());
  const int32_t num_pages = pages_within_budget(wanted);
  if (loop_.has_pool() && num_pages_ >= num_pages) return;
  num_pages_ = num_pages;
  loop_.take_pool();
  loop_.open_pool(num_pages);
}

bool Engine::Impl::generate_pass(const std::function<bool()>& should_stop) {
  const bool stops = should_stop && should_stop();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ready = [&] { return status_.runs_passes() || abort_all_ || status_.stopping; };
    if (!stops && !changed_.wait_for(lock, kLookAgain, ready)) return true;
  }
  const Boundary::Hold held = boundary_.enter_pass();
  if (stops) {
    loop_.abort([](const Live&) { return true; });
  } else {
    run_aborts();
    std::unique_lock<std::mutex> lock(mutex_);
    const bool runs = status_.runs_passes();
    lock.unlock();
    if (runs) run_pass();
  }
  publish();
  return !loop_.idle();
}

// An exception ends the call: nothing of the pass counts.
void Engine::Impl::run_pass() {
  try {
    loop_.step();
  } catch (...) {
    loop_.withdraw_pass();
    throw;
  }
}

GenerateStats Engine::Impl::generate(const std::vector<Prompt>& prompts,
                                     const SamplingParams& params,
                                     const OnFinished& on_finished,
                                     const std::function<bool()>& should_stop) {
  const auto started = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  std::vector<Request> requests = requests_from(prompts, params);
  if (requests.empty()) {
    loop_.join_others();
    return {};
  }
  TrajectoryDelivery delivery;  // outlives what an exception leaves in the loop
  enter_generate();
  const struct Leave {
    Impl* impl;
    ~Leave() { impl->leave_generate(); }
  } leave{this};
  std::optional<Start> start;
  int64_t logical_tokens = 0;
  {
    std::vector<std::unique_ptr<Live>> lives;
    for (Request& request : requests) {
      logical_tokens += static_cast<int64_t>(request.prompt.size()) * request.n;
      for (auto& live : lives_from(std::move(request), delivery)) lives.push_back(std::move(live));
    }
    const Boundary::Hold held = boundary_.enter_pass();
    start.emplace(loop_);
    open_pool_for(lives);
    for (std::unique_ptr<Live>& live : lives) loop_.add(std::move(live));
    loop_.close_queue(true);
    publish();  // a pause that drains must know of them
  }
  for (bool more = true; more;) {
    more = generate_pass(should_stop);
    for (Trajectory& trajectory : delivery.take()) on_finished(std::move(trajectory));
    BANYAN_CHECK(delivery.error().empty(), "[rollout] ", delivery.error());
  }
  GenerateStats stats;
  {
    const Boundary::Hold held = boundary_.enter_pass();
    loop_.join_others();
    stats = start->since(loop_);
  }
  stats.logical_prompt_tokens = logical_tokens;
  stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return stats;
}

}  // namespace banyan::rollout
