// Ranks that run every pass together, though each has blocks of its own: they agree on one order of
// passes (pass_order.h), and a rank idles through those that are not its own. Where weights are
// gathered pass by pass, parallel/fsdp.h does this itself.
#pragma once

#include <functional>
#include <string>

#include "banyan/core/param_keeper.h"
#include "banyan/parallel/collectives.h"

namespace banyan::parallel {

class Lockstep {
 public:
  // `idle` takes this rank's part in a pass of others. `ranks` is borrowed.
  Lockstep(Collectives& ranks, std::function<void(Pass)> idle)
      : ranks_(ranks), idle_(std::move(idle)) {}

  // (all) What this rank is about to do, 'F' and 'B'; it may be nothing.
  void start(const std::string& passes);
  // Before each of these: the passes of others that come first.
  void begin(Pass pass);
  // Those that only others have left.
  void finish();

 private:
  Collectives& ranks_;
  std::function<void(Pass)> idle_;
  std::string agreed_;
  size_t next_ = 0;
};

}  // namespace banyan::parallel
