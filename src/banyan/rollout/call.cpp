#include "banyan/rollout/call.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::rollout {
namespace {

const std::vector<std::string> kNoTokenBytes;

}  // namespace

Call::Call(models::CausalLM& model,
           const EngineOptions& options,
           const SamplingParams& params,
           const OnFinished& on_finished,
           std::vector<Group> groups,
           int32_t num_pages)
    : params_(params),
      on_finished_(on_finished),
      groups_(std::move(groups)),
      pages_(num_pages),
      tree_(pages_, options.share_prefix),
      scheduler_({.max_num_seqs = options.max_num_seqs,
                  .max_num_batched_tokens = options.max_num_batched_tokens,
                  .chunked_prefill = options.enable_chunked_prefill,
                  .expected_percent = params.ignore_eos || params.eos_ids.empty() ? 100 : 70},
                 pages_,
                 tree_,
                 groups_),
      kv_(model.shape().layers,
          model.shape().kv_heads,
          model.shape().head_dim,
          num_pages,
          model.options()),
      runner_(model, kv_),
      drawer_(model) {
  for (const Group& group : groups_) {
    stats_.logical_prompt_tokens +=
        group.prompt_length() * static_cast<int64_t>(group.sequences.size());
    SamplingParams own = params;
    own.max_tokens = group.max_new;
    plans_.push_back(std::make_unique<const SamplingPlan>(
        own, group.prompt, /*original_prompt=*/0, kNoTokenBytes));
    responses_.emplace_back(group.sequences.size(), ResponseState(*plans_.back()));
  }
}

GenerateStats Call::run(const std::function<bool()>& should_stop) {
  while (!scheduler_.done()) {
    if (should_stop && should_stop()) {
      abort();
      break;
    }
    scheduler_.next_pass(pass_);
    const at::Tensor hidden = runner_.run(pass_, groups_, scheduler_);
    ++stats_.num_passes;
    stats_.computed_prompt_tokens += pass_.num_prompt_tokens;
    const int64_t num_decodes = static_cast<int64_t>(pass_.decodes.size());
    if (num_decodes > 0) draw(hidden.narrow(0, 0, num_decodes), pass_.decodes);
    const int64_t num_trunks = static_cast<int64_t>(pass_.trunks.size());
    if (num_trunks > 0) draw(hidden.narrow(0, num_decodes, num_trunks), pass_.trunks);
  }
  BANYAN_ASSERT(pages_.num_free() == pages_.num_pages(), "rollout: pages leaked");
  stats_.num_preemptions = scheduler_.num_preemptions();
  return stats_;
}

// The children that a row is drawn for: one, or all of a group whose prompt just ended.
std::pair<int32_t, int32_t> Call::children_of(const DrawRow& row) const {
  if (row.child != kTrunk) return {row.child, row.child + 1};
  return {0, static_cast<int32_t>(groups_[row.group].sequences.size())};
}

void Call::draw(const at::Tensor& hidden, const std::vector<DrawRow>& rows) {
  requests_.clear();
  for (size_t r = 0; r < rows.size(); ++r) {
    const Group& group = groups_[rows[r].group];
    const auto [begin, end] = children_of(rows[r]);
    for (int32_t child = begin; child < end; ++child) {
      const Sequence& sequence = group.sequences[child];
      requests_.push_back({.row = static_cast<int32_t>(r),
                           .response = &responses_[rows[r].group][child],
                           .key = {.seed = params_.seed,
                                   .step = params_.step,
                                   .row = static_cast<uint64_t>(group.row),
                                   .index = static_cast<uint64_t>(sequence.index)},
                           .position = static_cast<uint64_t>(group.known(sequence))});
    }
  }
  drawer_.draw(hidden, requests_, drawn_, /*with_raw=*/false);
  size_t next = 0;
  for (const DrawRow& row : rows) {
    const auto [begin, end] = children_of(row);
    for (int32_t child = begin; child < end; ++child) take(row.group, child, drawn_[next++]);
  }
}

void Call::take(int32_t group_index, int32_t child, const Drawn& drawn) {
  BANYAN_CHECK(drawn.status == DrawStatus::kDrawn,
               "[rollout] ",
               explain(drawn.status),
               "; row ",
               groups_[group_index].row);
  scheduler_.append(group_index, child, drawn.record.token, drawn.logprob);
  if (plans_[group_index]->truncates) {
    groups_[group_index].sequences[child].sampled_logprobs.push_back(drawn.record.processed);
  }
  ++stats_.response_tokens;
  const Ending ending = responses_[group_index][child].append(drawn.record.token);
  if (ending) finish(group_index, child, ending.reason());
}

void Call::finish(int32_t group_index, int32_t child, FinishReason reason) {
  scheduler_.finish(group_index, child);
  Group& group = groups_[group_index];
  Sequence& sequence = group.sequences[child];
  Trajectory trajectory;
  trajectory.row = group.row;
  trajectory.index = sequence.index;
  trajectory.prompt = group.prompt;
  trajectory.response_mask.assign(sequence.response.size(), 1);
  trajectory.response = std::move(sequence.response);
  trajectory.rollout_log_probs = std::move(sequence.logprobs);
  trajectory.sampled_log_probs = std::move(sequence.sampled_logprobs);
  trajectory.finish = reason;
  on_finished_(std::move(trajectory));
}

void Call::abort() {
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (size_t c = 0; c < groups_[g].sequences.size(); ++c) {
      if (groups_[g].sequences[c].state == SequenceState::kFinished) continue;
      finish(static_cast<int32_t>(g), static_cast<int32_t>(c), FinishReason::kAbort);
    }
  }
}

}  // namespace banyan::rollout
