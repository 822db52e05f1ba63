// W = warm-up steps, T = total steps, q = min_lr_ratio; before W every schedule rises linearly from
// 0.
//   constant  lr
//   linear    lr (q + (1 - q) (1 - r)),  r = (t - W) / (T - W)
//   cosine    lr max(q, (1 + q) / 2 + (1 - q) / 2 cos(2 pi num_cycles r))
#include "banyan/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "banyan/core/error.h"

namespace banyan::optim {
namespace {

void check_options(const ScheduleOptions& options) {
  BANYAN_CHECK(options.type == "constant" || options.type == "linear" || options.type == "cosine",
               "[optim.lr_scheduler_type] wanted one of constant, linear, cosine, got '",
               options.type,
               "'");
  BANYAN_CHECK(std::isfinite(options.lr) && options.lr >= 0.0,
               "[optim.lr] wanted a finite number >= 0, got ",
               options.lr);
  BANYAN_CHECK(options.warmup_ratio >= 0.0 && options.warmup_ratio <= 1.0,
               "[optim.lr_warmup_steps_ratio] wanted a number in [0, 1], got ",
               options.warmup_ratio);
  BANYAN_CHECK(options.min_lr_ratio >= 0.0 && options.min_lr_ratio <= 1.0,
               "[optim.min_lr_ratio] wanted a number in [0, 1], got ",
               options.min_lr_ratio);
}

}  // namespace

ScheduleOptions schedule_from(const OptimConfig& optim, int64_t total_steps) {
  ScheduleOptions schedule;
  schedule.type = optim.lr_scheduler_type;
  schedule.lr = optim.lr;
  schedule.warmup_steps = optim.lr_warmup_steps;
  schedule.warmup_ratio = optim.lr_warmup_steps_ratio;
  schedule.min_lr_ratio = optim.min_lr_ratio;
  schedule.num_cycles = optim.num_cycles;
  schedule.zero_indexed_step = optim.zero_indexed_step;
  schedule.total_steps = total_steps;
  return schedule;
}

double learning_rate(const ScheduleOptions& options, int64_t t) {
  check_options(options);
  const auto total = static_cast<double>(options.total_steps);
  const double warmup = options.warmup_steps > 0 ? static_cast<double>(options.warmup_steps)
                                                 : std::floor(options.warmup_ratio * total);
  const auto done = static_cast<double>(options.zero_indexed_step ? t : t + 1);
  if (done < warmup) return options.lr * done / warmup;
  if (options.type == "constant") return options.lr;
  const double progress = (done - warmup) / std::max(1.0, total - warmup);
  const double floor = options.min_lr_ratio;
  if (options.type == "linear") {
    return options.lr * (floor + (1.0 - floor) * (1.0 - std::min(1.0, progress)));
  }
  const double wave = std::cos(2.0 * std::numbers::pi * options.num_cycles * progress);
  return options.lr * std::max(floor, 0.5 * (1.0 + floor) + 0.5 * (1.0 - floor) * wave);
}

}  // namespace banyan::optim
