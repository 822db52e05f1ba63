// The engine's thread and what a server asks of it: requests in, events out, aborts.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "banyan/core/error.h"
#include "banyan/rollout/control/engine_impl.h"
#include "banyan/rollout/control/together.h"
#include "banyan/rollout/control/weight_probe.h"
#include "banyan/rollout/memory/kv_budget.h"

namespace banyan::rollout {
namespace {

// A loop with work that cannot be planned looks again.
constexpr std::chrono::milliseconds kLookAgain{2};

}  // namespace

// max_num_seqs of the longest responses never wait, and as much is cached.
int64_t Engine::Impl::most_pages() const {
  return 2 * int64_t{options_.max_num_seqs} * (int64_t{pages_for(limits_.max_len)} + 1);
}

int32_t Engine::Impl::server_pages() const {
  const int32_t pages = pages_within_budget(most_pages());
  BANYAN_CHECK(pages >= 2,
               "[rollout] kv pool: wanted at least two pages of ",
               loop_.page_bytes(),
               " bytes, got room for ",
               pages,
               "; raise kv_cache_memory_bytes (or gpu_memory_utilization)");
  return pages;
}

void Engine::Impl::start() {
  BANYAN_CHECK(ranks_together(model_) == nullptr && model_.expert_ranks() == nullptr,
               "[rollout] start: wanted a whole model, got one that lies on several ranks, which "
               "generate the same batch together (generate)");
  const auto check_stopping = [&] {
    if (!status_.stopping) return;
    throw RequestError(503, "", "[rollout] start: a stop is in progress; call stop again", 1.0);
  };
  std::unique_lock<std::mutex> lock(mutex_);
  check_stopping();
  lock.unlock();
  const Boundary::Hold held = hold("start", Deadline(kControlSeconds));
  lock.lock();
  check_stopping();
  if (status_.started) return;
  if (status_.generating) {
    throw RequestError(409, "", "[rollout] start: a generate call is running");
  }
  const bool has_weights = !status_.weights_asleep && !status_.weights_missing;
  lock.unlock();
  const std::string wrong = has_weights ? probe_weights(model_) : "";
  if (!wrong.empty()) {
    throw RequestError(409, "", "[rollout] start: the weights do not compute: " + wrong);
  }
  num_pages_ = server_pages();
  if (!status_.kv_asleep) open_pool("start");
  lock.lock();
  status_.started = true;
  status_.stopping = status_.exited = false;
  thread_ = std::thread([this] { serve(); });
  lock.unlock();
  publish();
}

void Engine::Impl::stop(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!status_.started) return;
  status_.stopping = true;
  changed_.notify_all();
  if (!changed_.wait_until(lock, deadline.at(), [&] { return status_.exited; })) {
    lock.unlock();
    throw RequestError(503, "", detail::concat("[rollout] stop: ", whom(deadline.seconds())), 1.0);
  }
  lock.unlock();
  // A control call may be in progress. A stop that gives up here goes on when it is called again.
  const Boundary::Hold held = hold("stop", deadline);
  lock.lock();
  if (!status_.started) return;  // another call was faster
  status_.started = status_.stopping = false;
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
  loop_.take_pool();
  publish();
}

bool Engine::Impl::has_work() const {
  if (status_.stopping || abort_all_ || !aborts_.empty()) return true;
  return !reader_is_behind() && status_.runs_passes() && !(figures_.idle && inbox_.empty());
}

void Engine::Impl::serve() {
  const at::NoGradGuard no_grad;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (reader_is_behind()) ++num_backlogs_;
      changed_.wait(lock, [&] { return has_work(); });
      if (status_.stopping) break;
    }
    bool planned = true;
    {
      const Boundary::Hold held = boundary_.enter_pass();
      planned = guarded_turn();
      publish();
    }
    if (!planned) std::this_thread::sleep_for(kLookAgain);
  }
  end_everything();
}

void Engine::Impl::end_everything() {
  {
    const Boundary::Hold held = boundary_.enter_pass();
    refuse(take_inbox());
    loop_.abort([](const Live&) { return true; });
    {
      const std::unique_lock<std::mutex> lock(mutex_);
      aborts_.clear();
      abort_all_ = false;
      in_flight_.clear();
    }
    publish();
  }
  const std::unique_lock<std::mutex> lock(mutex_);
  status_.exited = true;
  changed_.notify_all();
}

std::deque<std::unique_ptr<Live>> Engine::Impl::take_inbox() {
  const std::unique_lock<std::mutex> lock(mutex_);
  inbox_tokens_ = 0;
  // What is taken is on its way into the loop: a pause that waits must not find both empty.
  if (!inbox_.empty()) figures_.idle = false;
  return std::exchange(inbox_, {});
}

void Engine::Impl::refuse(const std::deque<std::unique_ptr<Live>>& lives) {
  for (const std::unique_ptr<Live>& live : lives) refuse(*live, "");
}

void Engine::Impl::refuse(const Live& live, const std::string& error) {
  events_.ended_ids().insert(events_.ended_ids().end(), live.responses.size(), live.id);
  publish();
  events_.refuse(live, error);
}

// The thread outlives whatever goes wrong: then all that is in progress ends with the error.
bool Engine::Impl::guarded_turn() {
  try {
    return turn();
  } catch (const std::exception& error) {
    loop_.withdraw_pass();
    loop_.reset_cache(/*retract=*/true);
    loop_.fail([](const Live&) { return true; }, error.what());
    return true;
  }
}

// What may be done at this boundary: aborts always, new requests and a pass if passes run. False if
// there is work that cannot be planned.
bool Engine::Impl::turn() {
  run_aborts();
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    if (!status_.runs_passes() || reader_is_behind()) return true;
  }
  for (std::unique_ptr<Live>& live : take_inbox()) add_to_loop(std::move(live));
  try {
    return loop_.step() || loop_.idle();
  } catch (const std::exception& error) {
    loop_.failed_pass(error.what());
    return true;
  }
}

void Engine::Impl::add_to_loop(std::unique_ptr<Live> live) {
  try {
    loop_.add(std::move(live));
  } catch (const std::exception& error) {
    BANYAN_ASSERT(live, "the request that failed is gone");
    refuse(*live, error.what());
  }
}

int32_t Engine::Impl::run_aborts() {
  std::vector<std::string> ids;
  bool all = false;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    ids = std::exchange(aborts_, {});
    all = std::exchange(abort_all_, false);
  }
  if (!all && ids.empty()) return 0;
  std::sort(ids.begin(), ids.end());
  return loop_.abort(
      [&](const Live& live) { return all || std::binary_search(ids.begin(), ids.end(), live.id); });
}

std::string Engine::Impl::submit(Request request) {
  check_request(request, limits_, "");
  const auto length = static_cast<int64_t>(request.prompt.size());
  const int32_t n = request.n;
  std::unique_lock<std::mutex> lock(mutex_);
  check_accepts(length);
  check_fits(static_cast<int32_t>(length), room_for(request), num_pages_, loop_.page_bytes());
  if (request.id.empty()) request.id = "request-" + std::to_string(next_id_++);
  std::string id = request.id;
  lock.unlock();
  std::vector<std::unique_ptr<Live>> lives = lives_from(std::move(request), events_);
  lock.lock();
  check_accepts(length);  // it may be another state by now
  if (!in_flight_.emplace(id, n).second) {
    throw RequestError(400, "request_id", "[rollout] request_id: '" + id + "' is in progress");
  }
  inbox_tokens_ += length;
  for (std::unique_ptr<Live>& live : lives) inbox_.push_back(std::move(live));
  lock.unlock();
  changed_.notify_all();
  return id;
}

// With the lock.
void Engine::Impl::check_accepts(int64_t prompt_tokens) {
  if (!status_.started || status_.stopping) {
    throw RequestError(503, "", "[rollout] the engine does not run; start it first");
  }
  check_ready(status_);
  QueueState queue = figures_.queue;
  queue.requests += static_cast<int64_t>(inbox_.size());
  queue.prompt_tokens += inbox_tokens_;
  try {
    check_queue(options_, queue, prompt_tokens);
  } catch (const RequestError&) {
    ++num_rejected_;
    throw;
  }
}

void Engine::Impl::drain(std::vector<Event>& events) {
  if (events_.outbox().drain(events) <= options_.max_undrained_bytes) return;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
  }  // the thread waits, or has not looked yet
  changed_.notify_all();
}

// Requests that no pass has taken yet end here; the others at the next boundary.
int32_t Engine::Impl::abort(const std::vector<std::string>& ids) {
  std::deque<std::unique_ptr<Live>> untouched;
  int32_t count = 0;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    const auto wanted = [&](const std::string& id) {
      return ids.empty() || std::find(ids.begin(), ids.end(), id) != ids.end();
    };
    std::deque<std::unique_ptr<Live>> rest;
    for (std::unique_ptr<Live>& live : inbox_) {
      (wanted(live->id) ? untouched : rest).push_back(std::move(live));
    }
    inbox_ = std::move(rest);
    for (const std::unique_ptr<Live>& live : untouched) {
      inbox_tokens_ -= live->prompt_length;
      count += in_flight_.erase(live->id) > 0 ? 1 : 0;
    }
    if (ids.empty()) {
      count += static_cast<int32_t>(in_flight_.size());
      abort_all_ = true;
    } else {
      for (const std::string& id : ids) {
        if (!in_flight_.contains(id) ||
            std::find(aborts_.begin(), aborts_.end(), id) != aborts_.end()) {
          continue;
        }
        aborts_.push_back(id);
        ++count;
      }
    }
  }
  for (const std::unique_ptr<Live>& live : untouched) events_.refuse(*live, "");
  changed_.notify_all();
  return count;
}

}  // namespace banyan::rollout
