// The outside world of training on given text. The Python shell implements it
// (python/banyan/trainer/finetune.py), testing/fake_finetune_host.h implements it for C++ tests.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/host.h"
#include "banyan/core/sample.h"

namespace banyan::train {

// The samples of one row, `scored` = what is trained on. SFT: one, or one per assistant turn.
// Preferences: the chosen one, then the rejected one.
using Example = std::vector<Sample>;

class FinetuneHost : public RunHost {
 public:
  // The next `count` training rows in the loader's seeded order, epoch after epoch.
  virtual std::vector<int64_t> next_rows(int64_t count) = 0;
  // What those rows of the training (validation) data hold.
  virtual std::vector<Example> examples(const std::vector<int64_t>& rows, bool validation) = 0;
};

}  // namespace banyan::train
