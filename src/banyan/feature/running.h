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

// Calls `change`: now (true), or when the last open scope is left, in the order of these calls. It
// must not throw, and runs without a lock held.
bool when_idle(std::function<void()> change);

}  // namespace banyan::feature
