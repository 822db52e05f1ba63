// PassObserver: who wants to see a walk as it happens (train/sharing_observer.h, tests).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"

namespace banyan::train {

class PassObserver {
 public:
  virtual ~PassObserver() = default;

  // Gets the attention of a block before it runs and gives back what runs in its place: the same
  // numbers. `recompute`: the block's tokens run forward once more for their backward.
  virtual std::unique_ptr<AttentionContext> watch(int32_t block,
                                                  bool recompute,
                                                  std::unique_ptr<AttentionContext> inner) = 0;
  // The numbers of these samples of the plan's input have come out; `offsets` [samples + 1]
  // counts their scored tokens.
  virtual void outputs(const std::vector<int32_t>& samples,
                       const std::vector<int64_t>& offsets) = 0;
};

}  // namespace banyan::train
