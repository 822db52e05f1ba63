#include "banyan/rollout/sampling/row_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

constexpr float kBarred = -std::numeric_limits<float>::infinity();
constexpr float kLargestLogit = 1e29f;  // times 1 / T it is still finite
constexpr size_t kManyIds = 32;         // from here on one sort is cheaper than a count for each

bool ends_with(const std::vector<int32_t>& history, const int32_t* begin, const int32_t* end) {
  const int64_t count = end - begin;
  return static_cast<int64_t>(history.size()) >= count &&
         std::equal(begin, end, history.end() - count);
}

}  // namespace

RowSampler::RowSampler(int32_t vocab) : vocab_(vocab), truncation_(vocab), maxima_(vocab) {
  raw_.masses.resize(static_cast<size_t>(kernels::vocab_tiles(vocab)));
  scaled_.masses.resize(raw_.masses.size());
}

void RowSampler::load(float* z) {
  z_ = z;
  raw_.known = false;
  scaled_.known = false;
  truncated_for_ = nullptr;
}

const RowSampler::Tempered& RowSampler::raw() {
  if (!raw_.known) {
    raw_.law = kernels::row_law(z_, vocab_, 1.0f, raw_.masses.data());
    raw_.known = true;
  }
  return raw_;
}

const RowSampler::Tempered& RowSampler::tempered(const float* z, bool edited, float inverse_t) {
  if (!edited && inverse_t == 1.0f) return raw();
  if (edited || !scaled_.known || scaled_.inverse_t != inverse_t) {
    scaled_.law = kernels::row_law(z, vocab_, inverse_t, scaled_.masses.data());
    scaled_.inverse_t = inverse_t;
    scaled_.known = !edited;
  }
  return scaled_;
}

void RowSampler::draw(const ResponseState& response, float u, bool with_raw, Drawn& out) {
  const SamplingPlan& plan = response.plan();
  const SamplingParams& params = plan.params;
  TokenRecord& record = out.record;
  record = {.top = std::move(record.top), .sampling_mask = std::move(record.sampling_mask)};
  record.top.clear();
  record.sampling_mask.clear();
  const bool lists_top = params.top_logprobs >= 0 || !params.logprob_token_ids.empty();
  const bool needs_raw = with_raw || (lists_top && !params.processed_logprobs);
  if (needs_raw && !raw().law.finite()) {  // before anything is changed
    out.status = DrawStatus::kNotFinite;
    return;
  }
  const bool edited = response.edits();
  const float* const z = edited ? edit(response) : z_;
  const Tempered& law = tempered(z, edited, plan.inverse_temperature);
  if (!law.law.finite()) {
    restore();
    out.status = raw().law.finite() ? DrawStatus::kNothingLeft : DrawStatus::kNotFinite;
    return;
  }
  out.status = DrawStatus::kDrawn;
  if (edited) truncated_for_ = nullptr;
  const int32_t token = draw_token(z, plan, law, u);
  if (edited) truncated_for_ = nullptr;
  const double log_kept = plan.truncates ? truncation_.log_kept_mass() : 0.0;
  record.token = token;
  record.log_kept_mass = static_cast<float>(log_kept);
  out.logprob = static_cast<float>(law.log_softmax(z[token]));
  record.processed = static_cast<float>(law.log_softmax(z[token]) - log_kept);
  if (params.return_sampling_mask) list_survivors(z, plan.truncates, record.sampling_mask);
  if (lists_top && params.processed_logprobs) {
    list_top(
        z, law, plan.truncates, token, params.top_logprobs, params.logprob_token_ids, record.top);
  }
  restore();
  if (raw_.known) record.raw = static_cast<float>(raw_.log_softmax(z_[token]));
  if (lists_top && !params.processed_logprobs) {
    list_top(z_,
             raw_,
             /*truncated=*/false,
             token,
             params.top_logprobs,
             params.logprob_token_ids,
             record.top);
  }
}

int32_t RowSampler::draw_token(const float* z,
                               const SamplingPlan& plan,
                               const Tempered& law,
                               float u) {
  const kernels::TileMass* const masses = law.masses.data();
  const auto count_of = [&](int64_t tile) {
    return std::min<int64_t>(kernels::kVocabTile, vocab_ - tile * kernels::kVocabTile);
  };
  if (plan.greedy) {
    const int64_t tile = kernels::largest_tile(law.law, masses, vocab_);
    const int64_t first = tile * kernels::kVocabTile;
    return static_cast<int32_t>(
        first + kernels::largest_in_tile(law.law, z + first, count_of(tile), law.inverse_t));
  }
  if (plan.truncates) {
    if (truncated_for_ != &plan) truncation_.apply(z, law.law, plan);
    truncated_for_ = &plan;
    return truncation_.draw(u);
  }
  const kernels::TilePick pick = kernels::pick_tile(law.law, masses, vocab_, u);
  const int64_t first = pick.tile * kernels::kVocabTile;
  return static_cast<int32_t>(
      first + kernels::pick_in_tile(law.law, pick, z + first, count_of(pick.tile), law.inverse_t));
}

float* RowSampler::edit(const ResponseState& response) {
  edited_ = z_;
  if (response.plan().masks) mask(response);
  bar_tokens(response);
  for (const auto& [id, bias] : response.plan().params.logit_bias) {
    change(id, edited_[id] + std::clamp(bias, -100.0f, 100.0f));
  }
  if (response.plan().penalises) penalise(response);
  return edited_;
}

// Grammar, then allowed ids: a row of barred ids with the others copied in.
void RowSampler::mask(const ResponseState& response) {
  const SamplingPlan& plan = response.plan();
  masked_.assign(static_cast<size_t>(vocab_), kBarred);
  edited_ = masked_.data();
  const std::vector<int32_t>& allowed = plan.allowed;
  const auto admit = [&](int32_t id) {
    if (allowed.empty() || std::binary_search(allowed.begin(), allowed.end(), id)) {
      masked_[id] = z_[id];
    }
  };
  const TokenTable* const grammar = plan.params.grammar.get();
  if (grammar == nullptr) {
    for (const int32_t id : allowed) masked_[id] = z_[id];
    return;
  }
  const int32_t state = response.grammar_state();
  for (const int32_t* id = grammar->begin(state); id != grammar->end(state); ++id) admit(*id);
  if (grammar->is_final(state)) {
    for (const int32_t id : plan.params.eos_ids) admit(id);
  }
}

// Bad words, then the ends that min_tokens defers, except where the grammar leaves nothing else.
void RowSampler::bar_tokens(const ResponseState& response) {
  const SamplingPlan& plan = response.plan();
  for (const std::vector<int32_t>& word : plan.params.bad_words) {
    const int32_t* const last = word.data() + word.size() - 1;
    if (ends_with(response.history(), word.data(), last)) change(*last, kBarred);
  }
  if (!response.below_min_tokens()) return;
  const TokenTable* const grammar = plan.params.grammar.get();
  const int32_t state = response.grammar_state();
  if (grammar != nullptr && grammar->begin(state) == grammar->end(state)) return;
  for (const int32_t id : plan.end_ids) change(id, kBarred);
  if (grammar == nullptr) return;  // which admits EOS whatever ignore_eos says
  for (const int32_t id : plan.params.eos_ids) change(id, kBarred);
}

void RowSampler::penalise(const ResponseState& response) {
  const SamplingPlan& plan = response.plan();
  const auto repetition = static_cast<float>(plan.params.repetition_penalty);
  const auto frequency = static_cast<float>(plan.params.frequency_penalty);
  const auto presence = static_cast<float>(plan.params.presence_penalty);
  const auto repeated = [&](float z) { return z > 0.0f ? z / repetition : z * repetition; };
  for (const int32_t id : plan.prompt_tokens) change(id, repeated(edited_[id]));
  for (const ResponseState::TokenCount& entry : response.counts()) {
    float z = edited_[entry.token];
    if (!entry.in_prompt) z = repeated(z);
    z -= frequency * static_cast<float>(entry.count);
    z -= presence;
    change(entry.token, z);
  }
}

void RowSampler::change(int32_t id, float logit) {
  if (edited_ == z_) undo_.emplace_back(id, z_[id]);
  edited_[id] = logit == kBarred ? kBarred : std::clamp(logit, -kLargestLogit, kLargestLogit);
}

void RowSampler::restore() {
  for (; !undo_.empty(); undo_.pop_back()) z_[undo_.back().first] = undo_.back().second;
}

void RowSampler::list_survivors(const float* z, bool truncated, std::vector<int32_t>& out) const {
  if (truncated) {
    for (const Candidate& token : truncation_.survivors()) out.push_back(token.id);
    return;
  }
  for (int32_t id = 0; id < vocab_; ++id) {
    if (z[id] != kBarred) out.push_back(id);
  }
  if (static_cast<int32_t>(out.size()) == vocab_) out.clear();
}

// The token itself, the likeliest in order, then `ids`. Where the law was cut, what did not survive
// has no probability.
void RowSampler::list_top(const float* z,
                          const Tempered& law,
                          bool truncated,
                          int32_t token,
                          int32_t num_top,
                          const std::vector<int32_t>& ids,
                          std::vector<TokenLogprob>& out) {
  const double log_kept = truncated ? truncation_.log_kept_mass() : 0.0;
  const auto value = [&](int32_t id) {
    if (truncated && !truncation_.survives(z[id], id)) return kBarred;
    return static_cast<float>(law.log_softmax(z[id]) - log_kept);
  };
  const bool many = ids.size() > kManyIds;
  if (num_top > 0 || many) {
    maxima_.load(z);
    maxima_.first(many ? vocab_ : std::min(num_top, vocab_), likely_);
  }
  const auto rank = [&](int32_t id) {
    const Candidate candidate{.logit = z[id], .id = id};
    if (!many) return tokens_before(z, vocab_, candidate) + 1;
    const auto place = std::lower_bound(likely_.begin(), likely_.end(), candidate, comes_before);
    return static_cast<int32_t>(place - likely_.begin()) + 1;
  };
  out.push_back({.token = token, .logprob = value(token), .rank = rank(token)});
  for (int32_t i = 0; i < num_top && i < static_cast<int32_t>(likely_.size()); ++i) {
    const float logprob = value(likely_[i].id);
    if (logprob == kBarred) break;
    out.push_back({.token = likely_[i].id, .logprob = logprob, .rank = i + 1});
  }
  for (const int32_t id : ids) {
    out.push_back({.token = id, .logprob = value(id), .rank = rank(id)});
  }
}

bool RowSampler::score(int32_t token,
                       int32_t num_top,
                       const std::vector<int32_t>& ids,
                       std::vector<TokenLogprob>& out) {
  out.clear();
  if (!raw().law.finite()) return false;
  list_top(z_, raw_, /*truncated=*/false, token, num_top, ids, out);
  return true;
}

}  // namespace banyan::rollout
