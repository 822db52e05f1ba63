// Pause, resume, sleep and wake.
#include <algorithm>
#include <optional>

#include "banyan/core/error.h"
#include "banyan/rollout/control/engine_impl.h"
#include "banyan/rollout/control/memory_release.h"
#include "banyan/rollout/memory/kv_budget.h"

namespace banyan::rollout {
namespace {

constexpr const char* kWeights = "weights";
constexpr const char* kKvCache = "kv_cache";
constexpr const char* kGraphs = "graphs";  // step plans: made again by the first pass

std::vector<c10::Storage> joined(std::vector<c10::Storage> a, std::vector<c10::Storage> b) {
  for (c10::Storage& storage : b) a.push_back(std::move(storage));
  return a;
}

}  // namespace

// Shows at once: new requests are gated and no further pass starts (a draining engine goes on).
void Engine::Impl::begin_pause(PauseMode mode) {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    ++status_.num_pausing;
    status_.flowed_before = false;  // a pause while asleep outlasts the sleep
    status_.refuses = mode == PauseMode::kAbort || mode == PauseMode::kWait;
    if (mode == PauseMode::kWait) {
      if (status_.flow != Flow::kHalted || !figures_.idle) status_.flow = Flow::kDraining;
    } else {
      status_.pausing = status_.pausing || status_.flow != Flow::kHalted;
      status_.flow = Flow::kHalted;
    }
  }
  changed_.notify_all();
}

void Engine::Impl::wait_until_drained(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto over = [&] {
    return status_.flow != Flow::kDraining || status_.stopping || (figures_.idle && inbox_.empty());
  };
  if (!changed_.wait_until(lock, deadline.at(), over)) {
    std::string names;
    for (const auto& [id, left] : in_flight_) {
      if (names.size() > 200) break;
      names += (names.empty() ? ": " : ", ") + id;
    }
    throw RequestError(503,
                       "",
                       detail::concat("[rollout] pause: waited ",
                                      deadline.seconds(),
                                      " s for ",
                                      in_flight_.size(),
                                      " requests (",
                                      figures_.running,
                                      " responses running, ",
                                      figures_.waiting + inbox_.size(),
                                      " waiting)",
                                      names,
                                      "; the pause is called off"),
                       1.0);
  }
  if (status_.flow == Flow::kFlowing) {
    throw RequestError(409, "", "[rollout] pause: called off by a resume");
  }
}

int64_t Engine::Impl::carry_out_pause(PauseMode mode, const Deadline& deadline) {
  if (mode == PauseMode::kWait) wait_until_drained(deadline);
  const Boundary::Hold held = hold("pause", deadline);
  if (mode == PauseMode::kAbort) {
    refuse(take_inbox());
    loop_.abort([](const Live&) { return true; });
  }
  if (mode == PauseMode::kRetract) loop_.retract_all();
  int64_t settled = 0;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    if (status_.flow == Flow::kFlowing) {
      throw RequestError(409, "", "[rollout] pause: called off by a resume");
    }
    status_.flow = Flow::kHalted;
    status_.pausing = false;
    status_.settle();
    settled = status_.num_settled;
  }
  publish();
  return settled;
}

// The last of the pauses in progress that failed leaves the engine as it was before them, or as the
// call in between left it that went through.
void Engine::Impl::end_pause() {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    if (--status_.num_pausing == 0) status_.show(status_.settled);
  }
  changed_.notify_all();
}

// A pause that fails is called off: what runs goes on, and requests are taken as before.
int64_t Engine::Impl::pause(PauseMode mode, const Deadline& deadline) {
  begin_pause(mode);
  const struct End {
    Impl* impl;
    ~End() { impl->end_pause(); }
  } end{this};
  return carry_out_pause(mode, deadline);
}

void Engine::Impl::resume() {
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    if (status_.asleep()) {
      throw RequestError(409, "", "[rollout] resume: the engine is asleep; wake it first");
    }
    status_.flow = Flow::kFlowing;
    status_.pausing = status_.refuses = false;
    status_.settle();
  }
  changed_.notify_all();
}

// What a sleep needs after its pause.
Boundary::Hold Engine::Impl::hold_for_sleep(const Deadline& deadline,
                                            std::unique_lock<std::timed_mutex>& weights) {
  weights = std::unique_lock<std::timed_mutex>(weights_, deadline.at());
  if (!weights.owns_lock()) {
    throw RequestError(503, "", "[rollout] sleep: waited for a weight update", 1.0);
  }
  return hold("sleep", deadline);
}

int64_t Engine::Impl::sleep(int32_t level, PauseMode mode, const Deadline& deadline) {
  if (level < 0 || level > 2) {
    throw RequestError(
        400, "level", detail::concat("[rollout] sleep: wanted level 0, 1 or 2, got ", level));
  }
  const bool trained = is_trained();
  if (level == 2 && trained) {
    throw RequestError(
        409, "level", "[rollout] sleep: the weights are the trainer's; wanted level 0 or 1");
  }
  bool flowed = false;
  Status::Settled before;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    before = status_.settled;
    const bool dropped = status_.kv_asleep && (trained || status_.weights_asleep);
    if (status_.sleep_level >= level && (level == 0 || dropped)) return 0;
    flowed = status_.asleep() ? status_.flowed_before : status_.flow == Flow::kFlowing;
  }
  const int64_t paused = pause(mode, deadline);
  std::unique_lock<std::timed_mutex> weights;
  std::optional<Boundary::Hold> held;
  try {
    held.emplace(hold_for_sleep(deadline, weights));
  } catch (const RequestError&) {
    {
      const std::unique_lock<std::mutex> lock(mutex_);
      if (status_.num_settled == paused) status_.go_back(before);  // nobody came in between
    }
    changed_.notify_all();
    throw;
  }
  std::vector<c10::Storage> memory;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    if (status_.flow != Flow::kHalted) {
      throw RequestError(409, "", "[rollout] sleep: called off by a resume");
    }
    status_.sleep_level = level;
    status_.flowed_before = flowed;
    status_.settle();
    status_.kv_asleep = status_.kv_asleep || level >= 1;
    status_.weights_asleep = status_.weights_asleep || (level >= 1 && !trained);
    status_.weights_missing = status_.weights_missing || level == 2;
  }
  if (level >= 1) {
    pool_sleeps_ = pool_sleeps_ || loop_.has_pool();
    memory = loop_.take_pool();
    if (!trained) {
      memory = joined(std::move(memory),
                      level == 2 ? model_.params().take_masters() : model_.params().take_forms());
    }
  }
  publish();
  return release_memory(std::move(memory), model_.options().device);
}

std::vector<std::string> Engine::Impl::still_asleep() const {
  std::vector<std::string> tags;
  if (status_.weights_asleep) tags.push_back(kWeights);
  if (status_.kv_asleep) tags.push_back(kKvCache);
  return tags;
}

// Weights whose values are still there get their compute forms again, once; of others the memory
// alone, for the update to fill.
void Engine::Impl::wake_weights() {
  ParamTable& table = model_.params();
  if (!table.has_masters()) {
    int64_t num_bytes = 0;
    for (const Param& param : table.params())
      num_bytes += static_cast<int64_t>(param.master.nbytes());
    check_free_memory(
        "[rollout] wake: weights", num_bytes, read_memory(model_.options().device).free);
    table.restore_masters();
  } else if (!table.has_forms()) {
    table.repack();
  }
}

// An engine that only generates has a pool while it does.
void Engine::Impl::wake_kv(bool is_started) {
  if (pool_sleeps_ || is_started) open_pool("wake");
  pool_sleeps_ = false;
}

std::vector<std::string> Engine::Impl::wake(const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) {
    if (tag != kWeights && tag != kKvCache && tag != kGraphs) {
      throw RequestError(
          400,
          "tags",
          "[rollout] wake: wanted weights, kv_cache or graphs, got '" + tag.substr(0, 80) + "'");
    }
  }
  const auto wants = [&](const char* tag) {
    return tags.empty() || std::find(tags.begin(), tags.end(), tag) != tags.end();
  };
  const Deadline deadline(kControlSeconds);
  const std::unique_lock<std::timed_mutex> weights(weights_, deadline.at());
  if (!weights.owns_lock()) {
    throw RequestError(503, "", "[rollout] wake: waited for a weight update", 1.0);
  }
  const Boundary::Hold held = hold("wake", deadline);
  Status before;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    before = status_;
  }
  if (!before.asleep()) return {};
  const bool wakes_weights = before.weights_asleep && wants(kWeights);
  if (before.kv_asleep && !tags.empty() && wants(kKvCache) &&
      ((before.weights_asleep && !wakes_weights) || before.weights_missing)) {
    throw RequestError(409,
                       "tags",
                       "[rollout] wake: wanted the weights first (wake weights, update them, wake "
                       "kv_cache), so that old memory is never there beside new");
  }
  const auto set = [&](auto change) {
    const std::unique_lock<std::mutex> lock(mutex_);
    change(status_);
  };
  if (wakes_weights) {
    wake_weights();
    set([](Status& status) { status.weights_asleep = false; });
  }
  if (before.kv_asleep && wants(kKvCache)) {
    wake_kv(before.started);
    set([](Status& status) { status.kv_asleep = false; });
  }
  std::vector<std::string> asleep;
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    asleep = still_asleep();
    if (asleep.empty()) {
      status_.sleep_level = -1;
      if (status_.flowed_before) {
        status_.flow = Flow::kFlowing;
        status_.refuses = false;
      }
      status_.settle();
    }
  }
  publish();
  return asleep;
}

}  // namespace banyan::rollout
