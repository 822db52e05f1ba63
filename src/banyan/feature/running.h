// Which computations are under way, so that slots change between them and never within: the forward
// and the backward of a step go through the same ops.
//
//   const feature::Running running;   // at the top of a step, a scoring call, a pass of the
//   rollout
//
// Scopes nest and may be open on several threads at once. Being counted for the whole process is
// why this is a global. Torch-free, thread-safe.
#pragma once

#include <functional>
#include <memory>

namespace banyan::feature {

class Running {
 public:
  Running();
  // Carries out what was put off meanwhile, if no other scope is open.
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

bool is_running();

// A short change that must not throw, open a scope or call foreign code: no scope opens while it
// runs. It returns what is dropped when they may open again, since that may wait for other threads.
using Change = std::function<std::shared_ptr<const void>()>;

// Calls `change`: now (true), or when the last open scope is left, in the order of these calls.
bool when_idle(Change change);

}  // namespace banyan::feature
