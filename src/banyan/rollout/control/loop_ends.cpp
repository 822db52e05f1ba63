// Loop: what a pass drew is handed over, and responses end: by themselves, on demand or with an
// error.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "banyan/rollout/control/loop.h"

namespace banyan::rollout {
namespace {

// Opens every delivery that a batch of ends or tokens touches once, and closes them all. `open` is
// lent for its memory.
class Deliveries {
 public:
  explicit Deliveries(std::vector<Delivery*>& open) : open_(open) { open_.clear(); }
  ~Deliveries() {
    for (Delivery* delivery : open_) delivery->end();
  }
  Deliveries(const Deliveries&) = delete;
  Deliveries& operator=(const Deliveries&) = delete;

  void use(Delivery& delivery) {
    if (std::find(open_.begin(), open_.end(), &delivery) != open_.end()) return;
    delivery.begin();
    open_.push_back(&delivery);
  }

 private:
  std::vector<Delivery*>& open_;
};

}  // namespace

void Loop::deliver() {
  Deliveries deliveries(open_);
  for (size_t i = 0; i < targets_.size(); ++i) {
    Live& live = *lives_[targets_[i].group];
    deliveries.use(live.delivery);
    take(live, targets_[i].child, drawn_[i]);
  }
  for (const PromptRows& rows : pass_.prompt_rows) {
    Live& live = *lives_[rows.group];
    const bool whole =
        rows.first_position + rows.num_tokens == scheduler_.group(rows.group).prompt_length();
    if (!whole || live.plan.params.max_tokens > 0) continue;
    deliveries.use(live.delivery);
    for (int32_t child = 0; child < static_cast<int32_t>(live.responses.size()); ++child) {
      end(live, child, {.reason = FinishReason::kLength});
    }
  }
  remove_ended();
}

void Loop::take(Live& live, int32_t child, Drawn& drawn) {
  Response& response = live.responses[child];
  if (drawn.status != DrawStatus::kDrawn) {
    end(live, child, {.error = explain(drawn.status)});
    return;
  }
  scheduler_.append(live.group, child, drawn.record.token);
  ++counters_.generation_tokens;
  const int32_t position = response.state.num_tokens();
  if (response.spans.empty() || response.spans.back().epoch != epoch()) {
    response.spans.push_back({.epoch = epoch(), .version = {}, .start = position, .end = position});
  }
  response.spans.back().end = position + 1;
  const Ending ending = response.state.append(drawn.record.token);
  live.delivery.token(live, response, drawn);
  if (!ending) return;
  end(live,
      child,
      {.reason = ending.reason(),
       .stop_token = ending.stop_token,
       .stop_string = ending.stop_string});
}

void Loop::end(Live& live, int32_t child, Outcome outcome) {
  Response& response = live.responses[child];
  if (response.ended) return;
  response.ended = true;
  const Group& group = scheduler_.group(live.group);
  const Sequence& sequence = group.sequences[child];
  const bool by_itself = outcome.error.empty() && outcome.reason != FinishReason::kAbort;
  scheduler_.finish(live.group, child, by_itself ? Ended::kByItself : Ended::kAborted);
  outcome.prompt = &group.prompt();
  outcome.tokens = &sequence.response;
  outcome.cached_tokens = group.num_cached;
  outcome.num_retractions = sequence.num_retractions;
  outcome.queue_seconds = live.queue_seconds.value_or(0.0);
  label(response.spans);
  live.delivery.ended(live, response, outcome);
  if (!outcome.error.empty()) {
    ++counters_.finished_error;
  } else {
    switch (outcome.reason) {
      case FinishReason::kStop:
        ++counters_.finished_stop;
        break;
      case FinishReason::kLength:
        ++counters_.finished_length;
        break;
      case FinishReason::kAbort:
        ++counters_.finished_abort;
        break;
      case FinishReason::kRepetition:
        ++counters_.finished_repetition;
        break;
    }
  }
  if (++live.num_ended == static_cast<int32_t>(live.responses.size())) {
    ended_groups_.push_back(live.group);
  }
}

void Loop::remove_ended() {
  for (const int32_t group : ended_groups_) {
    scheduler_.forget(group);
    lives_[group].reset();
  }
  ended_groups_.clear();
}

int32_t Loop::end_all(const std::function<bool(const Live&)>& chosen, const Outcome& outcome) {
  Deliveries deliveries(open_);
  int32_t count = 0;
  for (const std::unique_ptr<Live>& live : lives_) {
    if (!live || !chosen(*live)) continue;
    deliveries.use(live->delivery);
    scheduler_.drop(live->group);
    for (int32_t child = 0; child < static_cast<int32_t>(live->responses.size()); ++child) {
      count += live->responses[child].ended ? 0 : 1;
      end(*live, child, outcome);
    }
  }
  remove_ended();
  return count;
}

int32_t Loop::abort(const std::function<bool(const Live&)>& chosen) {
  return end_all(chosen, {.reason = FinishReason::kAbort});
}

int32_t Loop::fail(const std::function<bool(const Live&)>& chosen, const std::string& error) {
  return end_all(chosen, {.error = error});
}

int32_t Loop::failed_pass(const std::string& error) {
  withdraw_pass();
  std::vector<int32_t> groups;
  for (const Run& run : pass_.runs) groups.push_back(run.group);
  for (const DrawRow& row : pass_.trunks) groups.push_back(row.group);
  std::sort(groups.begin(), groups.end());
  return fail(
      [&](const Live& live) {
        return std::binary_search(groups.begin(), groups.end(), live.group);
      },
      error);
}

}  // namespace banyan::rollout
