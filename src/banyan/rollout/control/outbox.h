// Events on their way from the engine's thread to who drains them.
//
// Tokens of one response that nobody has fetched yet are joined into one event, so the number of
// events is bounded by the number of responses however slow the reader is, and the tokens by what
// those may draw; `backlog` tells the engine to wait before it becomes much. The descriptor is
// readable while something is there: one write per pass, whatever the pass brought. Events keep
// their memory from one drain to the next. Torch-free.
#pragma once

#include <cstdint>
#include <map>
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
    void count_token() { ++outbox_.num_tokens_; }

   private:
    Outbox& outbox_;
    std::unique_lock<std::mutex> lock_;
    bool wrote_ = false;
  };

  int fd() const { return signal_.fd(); }
  // Everything since the last call, in order; `events` gives its memory to what comes next.
  void drain(std::vector<Event>& events);
  // Tokens that nobody has fetched.
  int64_t backlog() const;

 private:
  mutable std::mutex mutex_;
  Signal signal_;
  int64_t generation_ = 0;  // drains so far
  std::vector<Event> events_;
  std::vector<Event> spare_;  // emptied events with their memory
  int64_t num_tokens_ = 0;
};

}  // namespace banyan::rollout
