#include "banyan/rollout/sampling/response_state.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

constexpr size_t kFirstIndexSize = 64;

size_t slot_of(int32_t token, size_t mask) {
  return (static_cast<uint32_t>(token) * 0x9e3779b1u >> 7) & mask;
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

FinishReason Ending::reason() const {
  switch (kind) {
    case Kind::kLength:
      return FinishReason::kLength;
    case Kind::kRepetition:
      return FinishReason::kRepetition;
    default:
      return FinishReason::kStop;
  }
}

ResponseState::ResponseState(const SamplingPlan& plan)
    : plan_(&plan), grammar_state_(plan.grammar_start) {
  if (plan.penalises) index_.assign(kFirstIndexSize, -1);
  run_.assign(std::max(0, plan.params.repetition_detection.max_pattern), 0);
  matched_.assign(plan.params.stop.size(), 0);
  for (const int32_t token : plan.past) {
    remember(token);
    repeats();
    match_stops(token);
  }
}

Ending ResponseState::append(int32_t token) {
  const SamplingParams& params = plan_->params;
  const bool grammar_could_end = grammar_may_end();
  ++num_tokens_;
  remember(token);
  if ((!params.ignore_eos || grammar_could_end) && contains(params.eos_ids, token)) {
    return {.kind = Ending::Kind::kEos};
  }
  if (params.grammar) {
    grammar_state_ = params.grammar->next(grammar_state_, token);
    BANYAN_ASSERT(grammar_state_ >= 0, "response state: a token that the grammar bars");
  }
  const bool repeated = repeats();
  const Ending stopped = match_stops(token);
  if (contains(params.stop_token_ids, token)) {
    return {.kind = Ending::Kind::kStopToken, .stop_token = token};
  }
  if (num_tokens_ >= params.max_tokens) return {.kind = Ending::Kind::kLength};
  // A finished grammar without an EOS to say so.
  if (params.grammar && params.eos_ids.empty() &&
      params.grammar->begin(grammar_state_) == params.grammar->end(grammar_state_)) {
    return {.kind = Ending::Kind::kEos};
  }
  if (below_min_tokens()) return {};
  if (repeated) return {.kind = Ending::Kind::kRepetition};
  return stopped;
}

bool ResponseState::grammar_may_end() const {
  const TokenTable* const grammar = plan_->params.grammar.get();
  return grammar != nullptr && grammar->is_final(grammar_state_);
}

void ResponseState::remember(int32_t token) {
  if (plan_->penalises) count(token);
  if (!run_.empty() || !plan_->params.bad_words.empty()) history_.push_back(token);
}

void ResponseState::count(int32_t token) {
  const size_t mask = index_.size() - 1;
  size_t slot = slot_of(token, mask);
  for (; index_[slot] >= 0; slot = (slot + 1) & mask) {
    TokenCount& entry = counts_[index_[slot]];
    if (entry.token == token) {
      ++entry.count;
      return;
    }
  }
  const auto& prompt = plan_->prompt_tokens;
  index_[slot] = static_cast<int32_t>(counts_.size());
  counts_.push_back({.token = token,
                     .count = 1,
                     .in_prompt = std::binary_search(prompt.begin(), prompt.end(), token)});
  if (2 * counts_.size() > index_.size()) grow_index();
}

void ResponseState::grow_index() {
  index_.assign(2 * index_.size(), -1);
  const size_t mask = index_.size() - 1;
  for (size_t i = 0; i < counts_.size(); ++i) {
    size_t slot = slot_of(counts_[i].token, mask);
    while (index_[slot] >= 0) slot = (slot + 1) & mask;
    index_[slot] = static_cast<int32_t>(i);
  }
}

// A pattern of p tokens stands c times at the end exactly if the last p (c - 1) tokens each equal
// the one p before.
bool ResponseState::repeats() {
  const RepetitionDetection& detection = plan_->params.repetition_detection;
  const size_t last = history_.size() - 1;
  bool found = false;
  for (size_t period = 1; period <= run_.size(); ++period) {
    int32_t& run = run_[period - 1];
    run = last >= period && history_[last] == history_[last - period] ? run + 1 : 0;
    const int64_t wanted = static_cast<int64_t>(period) * (detection.min_count - 1);
    found |= static_cast<int32_t>(period) >= detection.min_pattern && run >= wanted;
  }
  return found;
}

// The match that ends first; of those that end with the same byte, the first in the list.
Ending ResponseState::match_stops(int32_t token) {
  Ending found;
  if (matched_.empty()) return found;
  const std::vector<std::string>& stops = plan_->params.stop;
  for (const char byte : (*plan_->token_bytes)[token]) {
    for (size_t i = 0; i < stops.size(); ++i) {
      const std::string& stop = stops[i];
      const int32_t* const link = plan_->stop_links.data() + plan_->stop_offsets[i];
      int32_t length = matched_[i];
      while (length > 0 && stop[length] != byte) length = link[length - 1];
      if (stop[length] == byte) ++length;
      if (length == static_cast<int32_t>(stop.size())) {
        if (!found) {
          found = {.kind = Ending::Kind::kStopString, .stop_string = static_cast<int32_t>(i)};
        }
        length = link[length - 1];
      }
      matched_[i] = length;
    }
  }
  return found;
}

}  // namespace banyan::rollout
