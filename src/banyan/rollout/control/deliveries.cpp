#include "banyan/rollout/control/deliveries.h"

#include <utility>

namespace banyan::rollout {

// --- trajectories ---

void TrajectoryDelivery::token(const Live& live, Response& response, Drawn& drawn) {
  response.logprobs.push_back(drawn.logprob);
  if (live.plan.truncates) response.sampled_logprobs.push_back(drawn.record.processed);
}

void TrajectoryDelivery::ended(const Live& live, Response& response, const Outcome& outcome) {
  if (!outcome.error.empty()) {
    if (error_.empty()) error_ = outcome.error;
    return;
  }
  Trajectory& trajectory = done_.emplace_back();
  trajectory.row = live.row;
  trajectory.index = response.index;
  trajectory.prompt = *outcome.prompt;
  trajectory.response = *outcome.tokens;
  trajectory.response_mask.assign(trajectory.response.size(), 1);
  trajectory.rollout_log_probs = std::move(response.logprobs);
  trajectory.sampled_log_probs = std::move(response.sampled_logprobs);
  trajectory.finish = outcome.reason;
  trajectory.weight_spans = std::move(response.spans);
}

std::vector<Trajectory> TrajectoryDelivery::take() { return std::exchange(done_, {}); }

// --- events ---

void EventDelivery::token(const Live& live, Response& response, Drawn& drawn) {
  std::vector<TokenRecord>& tokens = writer_->event(live.id, response.index, response.slot).tokens;
  tokens.emplace_back();
  std::swap(tokens.back(), drawn.record);
  writer_->count(bytes_of(tokens.back()));
}

void EventDelivery::ended(const Live& live, Response& response, const Outcome& outcome) {
  Event& event = writer_->event(live.id, response.index, response.slot);
  event.finished = true;
  event.finish = outcome.reason;
  event.stop_token = outcome.stop_token;
  event.stop_string = outcome.stop_string;
  event.error = outcome.error;
  event.prompt_tokens = static_cast<int32_t>(outcome.prompt->size());
  event.cached_tokens = outcome.cached_tokens;
  event.num_retractions = outcome.num_retractions;
  event.queue_seconds = outcome.queue_seconds;
  event.spans = response.spans;
  event.prompt_logprobs = live.prompt_logprobs;
  writer_->count(sizeof(Event));
  if (live.num_ended == 0 && live.prompt_logprobs) writer_->count(bytes_of(*live.prompt_logprobs));
  ended_ids_.push_back(live.id);
}

void EventDelivery::refuse(const Live& live, const std::string& error) {
  Outbox::Writer writer(outbox_);
  for (const Response& response : live.responses) {
    Outbox::Writer::Slot slot;
    Event& event = writer.event(live.id, response.index, slot);
    event.finished = true;
    event.finish = FinishReason::kAbort;
    event.error = error;
    event.prompt_tokens = live.prompt_length;
    writer.count(sizeof(Event));
  }
}

}  // namespace banyan::rollout
