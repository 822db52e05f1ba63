#include "banyan/feature/running.h"

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace banyan::feature {
namespace {

struct State {
  std::mutex mutex;
  int64_t open = 0;
  std::vector<Change> waiting;
};

State& state() {
  static State* const state = new State;  // outlives the threads that end after main
  return *state;
}

}  // namespace

Running::Running() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  ++state().open;
}

Running::~Running() {
  std::vector<Change> ready;  // dropped after the lock, as what they return
  std::vector<std::shared_ptr<const void>> dropped;
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (--state().open > 0) return;
  ready.swap(state().waiting);
  for (const Change& change : ready) dropped.push_back(change());
}

bool is_running() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().open > 0;
}

bool when_idle(Change change) {
  std::shared_ptr<const void> dropped;  // after the lock
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().open > 0) {
    state().waiting.push_back(std::move(change));
    return false;
  }
  dropped = change();
  return true;
}

}  // namespace banyan::feature
