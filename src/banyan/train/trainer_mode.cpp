#include "banyan/train/trainer_mode.h"

#include "banyan/algo/correction.h"
#include "banyan/core/error.h"
#include "banyan/train/correction.h"

namespace banyan::train {
namespace {

constexpr const char* kMode = "trainer.v1.trainer_mode";
constexpr const char* kNodes = "actor_rollout_ref.rollout.nnodes";

bool is_async(const Config& config) { return config.trainer_v1.trainer_mode == "separate_async"; }

bool is_separate(const Config& config) { return is_async(config) || !config.hybrid_engine; }

}  // namespace

int64_t num_rollout_ranks(const Config& config) {
  if (!is_separate(config)) return 0;
  return config.rollout.nnodes * config.rollout.n_gpus_per_node.value_or(1);
}

int64_t batches_ahead(const Config& config) {
  return is_async(config) ? config.trainer_v1.separate_async.num_warmup_batches : 0;
}

void check_trainer_mode(const Config& config, std::vector<std::string>& notes) {
  const TrainerV1Config& mode = config.trainer_v1;
  BANYAN_CHECK(is_async(config) || mode.trainer_mode == "sync",
               "[config] ",
               kMode,
               ": wanted sync or separate_async, got ",
               mode.trainer_mode);
  const int64_t nodes = config.rollout.nnodes;
  if (!is_separate(config)) {
    BANYAN_CHECK(nodes == 0,
                 "[config] ",
                 kNodes,
                 ": wanted 0 with actor_rollout_ref.hybrid_engine=true and ",
                 kMode,
                 "=sync, where the ranks that train generate, got ",
                 nodes);
    return;
  }
  BANYAN_CHECK(nodes >= 1,
               "[config] ",
               kNodes,
               ": wanted >= 1 with ",
               is_async(config) ? "trainer.v1.trainer_mode=separate_async"
                                : "actor_rollout_ref.hybrid_engine=false",
               ", got ",
               nodes,
               ": times n_gpus_per_node it is the number of ranks that only generate");
  if (!is_async(config)) return;
  const int64_t ahead = mode.separate_async.num_warmup_batches;
  BANYAN_CHECK(ahead == 0 || ahead == 1,
               "[config] trainer.v1.separate_async.num_warmup_batches: wanted 0 or 1, got ",
               ahead,
               ": one batch is generated ahead at most");
  const int64_t updates = config.train_batch_size / config.actor.ppo_mini_batch_size;
  BANYAN_CHECK(mode.separate_async.parameter_sync_step == updates,
               "[config] trainer.v1.separate_async.parameter_sync_step: wanted "
               "data.train_batch_size / actor_rollout_ref.actor.ppo_mini_batch_size (",
               updates,
               "), got ",
               mode.separate_async.parameter_sync_step,
               ": weights are handed over between two batches");
  const CorrectionConfig& correction = config.algorithm.rollout_correction;
  if (ahead == 1 && !correction.bypass_mode && !algo::corrects(correction_options(correction))) {
    notes.push_back(
        "each batch is one step old, and nothing weighs it for that: see "
        "algorithm.rollout_correction (rollout_is, or bypass_mode)");
  }
}

}  // namespace banyan::train
