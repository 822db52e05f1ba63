#include "banyan/core/profile.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

namespace banyan::profile {

namespace detail {

std::atomic<bool> enabled{false};

// Of one thread. The lock is the thread's own but for start() and stop().
struct Buffer {
  std::mutex mutex;
  std::vector<Event> events;
  int32_t thread = 0;
  int32_t depth = 0;
  int64_t recording = 0;  // of the events in it
};

}  // namespace detail

namespace {

using detail::Buffer;

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Buffer>> buffers;  // of threads that ended, too
  std::atomic<int64_t> recording{0};
};

Registry& registry() {
  static Registry instance;
  return instance;
}

thread_local Phase current_phase = Phase::kOther;

Buffer& own_buffer() {
  thread_local const std::shared_ptr<Buffer> buffer = [] {
    auto made = std::make_shared<Buffer>();
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    made->thread = static_cast<int32_t>(all.buffers.size());
    all.buffers.push_back(made);
    return made;
  }();
  return *buffer;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kOther:
      return "other";
    case Phase::kRollout:
      return "rollout";
    case Phase::kScore:
      return "score";
    case Phase::kForward:
      return "forward";
    case Phase::kLoss:
      return "loss";
    case Phase::kBackward:
      return "backward";
    case Phase::kRecompute:
      return "recompute";
    case Phase::kOptimizer:
      return "optimizer";
  }
  return "";
}

void start() {
  Registry& all = registry();
  all.recording.fetch_add(1);
  detail::enabled.store(true);
}

std::vector<Event> stop() {
  detail::enabled.store(false);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const int64_t recording = all.recording.fetch_add(1);
  std::vector<Event> out;
  for (const std::shared_ptr<Buffer>& buffer : all.buffers) {
    const std::lock_guard own(buffer->mutex);
    if (buffer->recording == recording) {
      std::copy_if(buffer->events.begin(),
                   buffer->events.end(),
                   std::back_inserter(out),
                   [](const Event& event) { return event.end_ns != 0; });
    }
    buffer->events = {};
  }
  return out;
}

void Scope::begin(const char* name, const Work& work) {
  Buffer& buffer = own_buffer();
  const std::lock_guard lock(buffer.mutex);
  const int64_t recording = registry().recording.load();
  if (buffer.recording != recording) {
    buffer.recording = recording;
    buffer.events.clear();
    buffer.depth = 0;
  }
  buffer_ = &buffer;
  recording_ = recording;
  index_ = static_cast<int64_t>(buffer.events.size());
  buffer.events.push_back({.name = name,
                           .phase = current_phase,
                           .thread = buffer.thread,
                           .depth = buffer.depth++,
                           .begin_ns = now_ns(),
                           .end_ns = 0,
                           .work = work});
}

void Scope::end() {
  const int64_t now = now_ns();
  const std::lock_guard lock(buffer_->mutex);
  // A scope that outlives its recording has no event any more.
  if (buffer_->recording != recording_ || index_ >= static_cast<int64_t>(buffer_->events.size())) {
    return;
  }
  buffer_->events[index_].end_ns = now;
  --buffer_->depth;
}

// current_phase changes before scope_ begins, so that the phase's own event belongs to it.
PhaseScope::PhaseScope(Phase phase)
    : before_(std::exchange(current_phase,
                            current_phase == Phase::kScore || current_phase == Phase::kRecompute
                                ? current_phase
                                : phase)),
      scope_(phase_name(current_phase)) {}

PhaseScope::~PhaseScope() { current_phase = before_; }

}  // namespace banyan::profile
