// verl's over_sample_rate, by group: more prompts are asked for than the step needs, and once
// (1 - rate) of the groups have all their responses, the rest is cut off. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>

namespace banyan::rollout {

class TailCut {
 public:
  // rate in [0, 1); 0 never cuts.
  TailCut(int64_t num_groups, double rate)
      : cuts_(rate > 0.0),
        left_(static_cast<int64_t>(
            std::ceil((1.0 - rate) * static_cast<double>(num_groups) - 1e-9))) {}

  // A group has all its responses. True, once: enough groups have; drop the others
  // (Scheduler::drop).
  bool on_group_done() { return --left_ == 0 && cuts_; }

 private:
  bool cuts_;
  int64_t left_;
};

}  // namespace banyan::rollout
