// How rollouts travel between ranks: the members of what is in them (train/wire.h).
#pragma once

#include "banyan/core/sample.h"
#include "banyan/train/rollout_stage.h"
#include "banyan/train/wire.h"

namespace banyan::train {

template <typename Wire, Is<WeightSpan> T>
void fields(Wire& wire, T& span) {
  wire(span.epoch, span.version, span.start, span.end);
}

template <typename Wire, Is<Trajectory> T>
void fields(Wire& wire, T& t) {
  wire(t.row, t.index, t.prompt, t.response, t.response_mask);
  wire(t.rollout_log_probs, t.sampled_log_probs, t.reward_model_score, t.finish, t.weight_spans);
}

template <typename Wire, Is<Score> T>
void fields(Wire& wire, T& score) {
  wire(score.row, score.index, score.failed, score.reason, score.value, score.extra, score.texts);
}

// Without the unfinished groups, which have a form of their own.
template <typename Wire, Is<RolloutResult> T>
void fields(Wire& wire, T& result) {
  wire(result.trajectories, result.scores, result.stats);
  wire(result.generate_seconds, result.wait_seconds);
}

}  // namespace banyan::train
