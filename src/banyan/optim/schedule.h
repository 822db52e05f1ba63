// Learning-rate schedules (algorithms spec section 12). t counts training steps done, from 0.
#pragma once

#include <cstdint>
#include <string>

#include "banyan/core/config.h"

namespace banyan::optim {

struct ScheduleOptions {
  std::string type = "constant";  // constant | linear | cosine
  double lr = 1e-6;
  int64_t warmup_steps = -1;  // > 0 wins over the ratio
  double warmup_ratio = 0.0;
  double min_lr_ratio = 0.0;      // cosine and linear end at lr * min_lr_ratio
  double num_cycles = 0.5;        // cosine
  bool zero_indexed_step = true;  // false: t + 1
  int64_t total_steps = 1;
};

// The schedule of a run of `total_steps` steps under the keys of `optim`.
ScheduleOptions schedule_from(const OptimConfig& optim, int64_t total_steps);

// Learning rate of training step t (0-based). Throws [optim.lr_scheduler_type] on an unknown type.
double learning_rate(const ScheduleOptions& options, int64_t t);

}  // namespace banyan::optim
