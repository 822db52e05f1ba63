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
           std::vector<CallGroup> groups,
           int32_t num_pages)
    : params_(params),
      on_finished_(on_finished),
      scheduler_({.max_num_seqs = options.max_num_seqs,
                  .max_num_batched_tokens = options.max_num_batched_tokens,
                  .share_prefix = options.share_prefix,
                  .chunked_prefill = options.enable_chunked_prefill,
                  .page_bytes = ops::KvPool::page_bytes(model.shape().layers,
                                                        model.shape().kv_heads,
                                                        model.shape().head_dim,
                                                        model.options())}),
      groups_(std::move(groups)),
      kv_(model.shape().layers,
          model.shape().kv_heads,
          model.shape().head_dim,
          std::max(num_pages, 1),
          model.options()),
      runner_(model, kv_),
      drawer_(model) {
  scheduler_.set_num_pages(num_pages);
  scheduler_.close_queue(true);
  for (CallGroup& group : groups_) {
    const int64_t n = group.request.n;
    stats_.logical_prompt_tokens += static_cast<int64_t>(group.request.prompt.size()) * n;
    SamplingParams own = params;
    own.max_tokens = group.request.max_new;
    plans_.push_back(std::make_unique<const SamplingPlan>(
        own, group.request.prompt, /*original_prompt=*/0, kNoTokenBytes));
    responses_.emplace_back(n, ResponseState(*plans_.back()));
    logprobs_.emplace_back(n);
    const size_t id = scheduler_.add(std::move(group.request));
    BANYAN_ASSERT(id + 1 == responses_.size(), "rollout: ids of a new schedule are not 0, 1, ...");
  }
}

GenerateStats Call::run(const std::function<bool()>& should_stop) {
  while (!scheduler_.idle()) {
    if (should_stop && should_stop()) {
      abort();
      break;
    }
    BANYAN_ASSERT(scheduler_.next_pass(pass_), "rollout: an empty pass with responses to go");
    const at::Tensor hidden = runner_.run(pass_, scheduler_);
    ++stats_.num_passes;
    stats_.computed_prompt_tokens += pass_.num_prompt_tokens;
    const int64_t num_decodes = static_cast<int64_t>(pass_.decodes.size());
    if (num_decodes > 0) draw(hidden.narrow(0, 0, num_decodes), pass_.decodes);
    const int64_t num_trunks = static_cast<int64_t>(pass_.trunks.size());
    if (num_trunks > 0) draw(hidden.narrow(0, num_decodes, num_trunks), pass_.trunks);
  }
  BANYAN_ASSERT(scheduler_.num_used_pages() == 0, "rollout: pages leaked");
  stats_.num_preemptions = scheduler_.counters().preemptions;
  return stats_;
}

// The children that a row is drawn for: one, or all of a group whose prompt just ended.
std::pair<int32_t, int32_t> Call::children_of(const DrawRow& row) const {
  if (row.child != kTrunk) return {row.child, row.child + 1};
  return {0, scheduler_.group(row.group).size()};
}

void Call::draw(const at::Tensor& hidden, const std::vector<DrawRow>& rows) {
  requests_.clear();
  for (size_t r = 0; r < rows.size(); ++r) {
    const Group& group = scheduler_.group(rows[r].group);
    const CallGroup& named = groups_[rows[r].group];
    const auto [begin, end] = children_of(rows[r]);
    for (int32_t child = begin; child < end; ++child) {
      const Sequence& sequence = group.sequences[child];
      requests_.push_back({.row = static_cast<int32_t>(r),
                           .response = &responses_[rows[r].group][child],
                           .key = {.seed = params_.seed,
                                   .step = params_.step,
                                   .row = static_cast<uint64_t>(named.row),
                                   .index = static_cast<uint64_t>(named.first_index + child)},
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
  scheduler_.append(group_index, child, drawn.record.token);
  Logprobs& logprobs = logprobs_[group_index][child];
  logprobs.full.push_back(drawn.logprob);
  if (plans_[group_index]->truncates) logprobs.sampled.push_back(drawn.record.processed);
  ++stats_.response_tokens;
  const Ending ending = responses_[group_index][child].append(drawn.record.token);
  if (ending) finish(group_index, child, ending.reason());
}

void Call::finish(int32_t group_index, int32_t child, FinishReason reason) {
  scheduler_.finish(
      group_index, child, reason == FinishReason::kAbort ? Ended::kAborted : Ended::kByItself);
  const Group& group = scheduler_.group(group_index);
  Logprobs& logprobs = logprobs_[group_index][child];
  Trajectory trajectory;
  trajectory.row = groups_[group_index].row;
  trajectory.index = groups_[group_index].first_index + child;
  trajectory.prompt = group.prompt();
  trajectory.response = group.sequences[child].response;
  trajectory.response_mask.assign(trajectory.response.size(), 1);
  trajectory.rollout_log_probs = std::move(logprobs.full);
  trajectory.sampled_log_probs = std::move(logprobs.sampled);
  trajectory.finish = reason;
  on_finished_(std::move(trajectory));
}

void Call::abort() {
  for (int32_t g = 0; g < static_cast<int32_t>(groups_.size()); ++g) {
    for (int32_t c = 0; c < scheduler_.group(g).size(); ++c) {
      if (scheduler_.group(g).sequences[c].state != SequenceState::kFinished) {
        finish(g, c, FinishReason::kAbort);
      }
    }
  }
}

}  // namespace banyan::rollout
