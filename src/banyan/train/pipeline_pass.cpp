#include "banyan/train/pipeline_pass.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/parallel/lockstep.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::train {
namespace {

using trie::Action;

// FNV-1a over what the order of messages and their sizes follow from; whole in a double.
double print_of(const trie::Plan& plan, const std::vector<trie::Entry>& entries) {
  uint64_t hash = 14695981039346656037ull;
  const auto add = [&hash](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211ull;
  };
  for (const trie::Block& block : plan.blocks) {
    add(block.num_own());
    add(block.num_carried);
    for (const int32_t token : block.trie.tok) add(token);
  }
  for (const trie::Entry& entry : entries) {
    add(static_cast<int64_t>(entry.action));
    add(entry.block);
  }
  return static_cast<double>(hash >> 12);
}

}  // namespace

PipelinePass::PipelinePass(const models::CausalLM& model,
                           const trie::Plan& plan,
                           TokensOf tokens_of)
    : model_(model), plan_(plan), tokens_of_(std::move(tokens_of)), stage_(model.stage()) {}

int64_t PipelinePass::key_of(int64_t link, Action action, int32_t round) const {
  const int64_t num_links = stage_->ranks().size() * num_chunks();
  return (round * num_links + link) * 2 + (action == Action::kBackward ? 1 : 0);
}

size_t PipelinePass::step_of(int64_t link, Action action, int32_t round) const {
  return steps_[link % stage_->ranks().size()].at(key_of(link, action, round));
}

const parallel::PipelineSteps& PipelinePass::begin(const std::vector<trie::Entry>& own) {
  parallel::Collectives* experts = model_.expert_ranks();
  const std::vector<trie::Entry> entries =
      experts == nullptr ? own : parallel::in_lockstep(own, *experts);
  const int64_t num_ranks = is_alone() ? 1 : stage_->ranks().size();
  const int64_t rank = is_alone() ? 0 : stage_->ranks().rank();
  const bool goes_back = std::any_of(entries.begin(), entries.end(), [](const trie::Entry& entry) {
    return entry.action == Action::kBackward;
  });
  most_open_ = goes_back || num_chunks() > 1 ? 0 : 2 * num_ranks;
  lists_ = is_alone() ? parallel::pipeline_schedule(entries, 1, 1) : stage_->schedule(entries);
  if (is_alone()) return lists_[0];
  const std::vector<double> prints = stage_->ranks().all_gather_number(print_of(plan_, entries));
  BANYAN_ASSERT(std::all_of(prints.begin(), prints.end(), [&](double x) { return x == prints[0]; }),
                "the stages of a pipeline have made different plans");
  steps_.assign(num_ranks, {});
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (size_t i = 0; i < lists_[r].size(); ++i) {
      const parallel::PipelineStep& step = lists_[r][i];
      if (step.action != Action::kForward && step.action != Action::kBackward) continue;
      if (step.round == parallel::kIdle) continue;  // no message belongs to it
      steps_[r].emplace(key_of(step.chunk * num_ranks + r, step.action, step.round), i);
    }
  }
  return lists_[rank];
}

void PipelinePass::end() {
  for (const Sent& sent : sent_) sent.wait();
  sent_.clear();
}

int64_t PipelinePass::link_of(int32_t chunk) const {
  return chunk * stage_->ranks().size() + stage_->ranks().rank();
}

// Rows of the residual stream that this rank holds of a round.
std::vector<int64_t> PipelinePass::shape_of(int32_t round) const {
  int64_t rows = tokens_of_(round);
  const parallel::TensorParallel* tensor = model_.tensor();
  if (tensor != nullptr && tensor->is_sequence_parallel()) {
    rows = (rows + tensor->ranks().size() - 1) / tensor->ranks().size();
  }
  return {rows, model_.shape().hidden};
}

void PipelinePass::send(int64_t to_link, Action action, int32_t round, const at::Tensor& tensor) {
  BANYAN_ASSERT(tensor.sizes() == shape_of(round) && tensor.scalar_type() == model_.options().dtype,
                "rows of round ",
                round,
                " have shape ",
                tensor.sizes());
  parallel::Collectives& ranks = stage_->ranks();
  const int64_t to = to_link % ranks.size();
  sent_.push_back({to,
                   step_of(to_link, action, round),
                   ranks.start_send(tensor.to(at::kCPU), to, key_of(to_link, action, round))});
  while (most_open_ > 0 && static_cast<int64_t>(sent_.size()) > most_open_) {
    sent_.front().wait();
    sent_.pop_front();
  }
}

// What the sender did at this step it did behind all that it took before.
at::Tensor PipelinePass::receive(int64_t from_link, int64_t link, Action action, int32_t round) {
  parallel::Collectives& ranks = stage_->ranks();
  const int64_t from = from_link % ranks.size();
  at::Tensor tensor = at::empty(shape_of(round), model_.options().dtype);
  ranks.receive(tensor, from, key_of(link, action, round));
  const size_t reached = step_of(from_link, action, round);
  std::deque<Sent> waiting;
  for (Sent& sent : sent_) {
    if (sent.to == from && sent.arrives <= reached) {
      sent.wait();
    } else {
      waiting.push_back(std::move(sent));
    }
  }
  sent_ = std::move(waiting);
  return tensor.to(model_.options().device);
}

at::Tensor PipelinePass::receive_rows(int32_t round, int32_t chunk) {
  return receive(link_of(chunk) - 1, link_of(chunk), Action::kForward, round);
}

at::Tensor PipelinePass::receive_gradient(int32_t round, int32_t chunk) {
  return receive(link_of(chunk) + 1, link_of(chunk), Action::kBackward, round);
}

void PipelinePass::send_rows(int32_t round, int32_t chunk, const at::Tensor& rows) {
  send(link_of(chunk) + 1, Action::kForward, round, rows);
}

void PipelinePass::send_gradient(int32_t round, int32_t chunk, const at::Tensor& gradient) {
  send(link_of(chunk) - 1, Action::kBackward, round, gradient);
}

void PipelinePass::tell(at::Tensor& numbers) {
  stage_->ranks().broadcast(numbers, stage_->ranks().size() - 1);
}

}  // namespace banyan::train
