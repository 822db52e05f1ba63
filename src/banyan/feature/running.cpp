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
  std::vector<std::function<void()>> waiting;
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
  std::vector<std::function<void()>> ready;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (--state().open == 0) ready.swap(state().waiting);
  }
  for (const std::function<void()>& change : ready) change();
}

bool is_running() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().open > 0;
}

bool when_idle(std::function<void()> change) {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (state().open > 0) {
      state().waiting.push_back(std::move(change));
      return false;
    }
  }
  change();
  return true;
}

}  // namespace banyan::feature
