// Events on their way from the engine's thread to who drains them.
//
// Tokens of one response that nobody has fetched yet are joined into one event, so the number of
// events is bounded by the number of responses however slow the reader is; `backlog` tells the
// engine to wait before what is in them becomes much. The descriptor is
// readable while something is there: one write per pass, whatever the pass brought. Events keep
// their memory from one drain to the next. Torch-free.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "banyan/rollout/event.h"

namespace banyan::rollout {

// A descriptor that a reader may wait on: eventfd on Linux, else a pipe.
class Signal {
 public:
  Signal();
  ~Signal();
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;

  int fd() const { return read_; }
  void raise();  // readable from now on
  void lower();  // until the next raise

 private:
  int read_ = -1;
  int write_ = -1;  // equals read_ for an eventfd
};

// Memory of what the events hold.
int64_t bytes_of(const TokenRecord& record);
int64_t bytes_of(const PromptLogprobs& logprobs);

class Outbox {
 public:
  // Events of one pass. Holds the lock: short.
  class Writer {
   public:
    explicit Writer(Outbox& outbox) : outbox_(outbox), lock_(outbox.mutex_) {}
    // Wakes the reader if anything was added.
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;

    // The event of response `index` of `request` that has not been fetched; a new one if there is
    // none. `slot` belongs to the response: the writer finds the event through it next time.
    struct Slot {
      int64_t generation = -1;
      int32_t event = -1;
    };
    Event& event(const std::string& request, int32_t index, Slot& slot);
    // So many bytes more wait for the reader.
    void count(int64_t num_bytes) { outbox_.num_bytes_ += num_bytes; }

   private:
    Outbox& outbox_;
    std::unique_lock<std::mutex> lock_;
    bool wrote_ = false;
  };

  int fd() const { return signal_.fd(); }
  // Everything since the last call, in order; `events` gives its memory to what comes next. The
  // backlog that there was.
  int64_t drain(std::vector<Event>& events);
  // Bytes that nobody has fetched. Takes no lock.
  int64_t backlog() const { return num_bytes_; }

 private:
  mutable std::mutex mutex_;
  Signal signal_;
  int64_t generation_ = 0;  // drains so far
  std::vector<Event> events_;
  std::vector<Event> spare_;  // emptied events with their memory
  std::atomic<int64_t> num_bytes_{0};
};

}  // namespace banyan::rollout
