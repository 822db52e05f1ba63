#include "banyan/rollout/control/outbox.h"

#include <fcntl.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/eventfd.h>
#endif

#include <cerrno>
#include <cstring>

#include "banyan/core/error.h"

namespace banyan::rollout {
namespace {

constexpr size_t kMaxSpare = 1024;  // events whose memory is kept
// Of tokens that such an event has room for: what a slow reader has let grow is given back.
constexpr size_t kMostSpareTokens = 64;

// The event as it was made, with the memory of its vectors.
void reset(Event& event) {
  event.tokens.clear();
  event.finished = false;
  event.finish = FinishReason::kStop;
  event.stop_token = event.stop_string = -1;
  event.error.clear();
  event.prompt_tokens = event.cached_tokens = event.num_retractions = 0;
  event.queue_seconds = 0.0;
  event.spans.clear();
  event.prompt_logprobs.reset();
}

}  // namespace

int64_t bytes_of(const TokenRecord& record) {
  return static_cast<int64_t>(sizeof(record) + record.top.size() * sizeof(TokenLogprob) +
                              record.sampling_mask.size() * sizeof(int32_t));
}

int64_t bytes_of(const PromptLogprobs& logprobs) {
  size_t total = 0;
  for (const std::vector<TokenLogprob>& values : logprobs) {
    total += sizeof(values) + values.size() * sizeof(TokenLogprob);
  }
  return static_cast<int64_t>(total);
}

Signal::Signal() {
#if defined(__linux__)
  read_ = write_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const bool made = read_ >= 0;
#else
  int ends[2] = {-1, -1};
  const bool made = pipe(ends) == 0;
  read_ = ends[0];
  write_ = ends[1];
  for (const int end : ends) {
    if (made) fcntl(end, F_SETFL, O_NONBLOCK), fcntl(end, F_SETFD, FD_CLOEXEC);
  }
#endif
  if (!made) {
    throw std::runtime_error(std::string("[rollout] event descriptor: ") + std::strerror(errno));
  }
}

Signal::~Signal() {
  close(read_);
  if (write_ != read_) close(write_);
}

// A full pipe or counter is readable already.
void Signal::raise() {
  const uint64_t one = 1;
  while (write(write_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Signal::lower() {
  uint64_t count[8];
  while (true) {
    const ssize_t got = read(read_, count, read_ == write_ ? sizeof(count[0]) : sizeof(count));
    if (got < 0 && errno == EINTR) continue;
    if (got < static_cast<ssize_t>(sizeof(count)) || read_ == write_) return;
  }
}

Outbox::Writer::~Writer() {
  if (wrote_) outbox_.signal_.raise();
}

Event& Outbox::Writer::event(const std::string& request, int32_t index, Slot& slot) {
  wrote_ = true;
  if (slot.generation == outbox_.generation_) return outbox_.events_[slot.event];
  slot = {outbox_.generation_, static_cast<int32_t>(outbox_.events_.size())};
  if (outbox_.spare_.empty()) {
    outbox_.events_.emplace_back();
  } else {
    outbox_.events_.push_back(std::move(outbox_.spare_.back()));
    outbox_.spare_.pop_back();
  }
  Event& event = outbox_.events_.back();
  event.request = request;
  event.index = index;
  return event;
}

int64_t Outbox::drain(std::vector<Event>& events) {
  for (Event& event : events) reset(event);
  const std::unique_lock<std::mutex> lock(mutex_);
  signal_.lower();
  for (Event& event : events) {
    if (spare_.size() == kMaxSpare) break;
    if (event.tokens.capacity() > kMostSpareTokens) continue;
    spare_.push_back(std::move(event));
  }
  events.clear();
  std::swap(events, events_);
  ++generation_;
  return num_bytes_.exchange(0);
}

}  // namespace banyan::rollout
