#include "banyan/train/walk.h"

#include <numeric>
#include <utility>

#include "banyan/core/profile.h"
#include "banyan/feature/running.h"
#include "banyan/train/detail/walk_pass.h"

namespace banyan::train {
namespace {

using detail::HeadNumbers;
using detail::Keep;
using detail::WalkPass;

// True if a backward stands in front of a forward.
bool goes_back_and_forth(const trie::Plan& plan) {
  bool back = false;
  for (const trie::Entry& entry : plan.entries) {
    back = back || entry.action == trie::Action::kBackward;
    if (back && entry.action == trie::Action::kForward) return true;
  }
  return false;
}

// The plan of a rank without samples is empty.
std::vector<int32_t> all_samples(const trie::Plan& plan) {
  if (plan.logical.offsets.empty()) return {};
  std::vector<int32_t> samples(plan.logical.offsets.size() - 1);
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

// Forwards of a pass without gradients over all blocks, which a rank runs one by one or one a
// round.
std::string forwards_of(const trie::Plan& plan) {
  const auto width = static_cast<size_t>(plan.blocks_per_round);
  return std::string((plan.blocks.size() + width - 1) / width, 'F');
}

// The passes of a walk's entries, behind a pass without gradients over all blocks if there is one.
std::string passes_of(const trie::Plan& plan, bool scored_before) {
  std::string passes = scored_before ? forwards_of(plan) : "";
  for (const trie::Entry& entry : plan.entries) {
    if (entry.action == trie::Action::kBackward) passes += 'B';
    if (entry.action == trie::Action::kForward || entry.action == trie::Action::kRecompute) {
      passes += 'F';
    }
  }
  return passes;
}

}  // namespace

bool walks_together(models::CausalLM& model) {
  return model.params().keeper() != nullptr || model.expert_ranks() != nullptr;
}

WalkStats walk(models::CausalLM& model,
               const trie::Plan& plan,
               const HeadSpec& head,
               LossScope scope,
               const LossFunction& loss,
               PassObserver* observer,
               const RouterWatch& routers,
               const ContextGroup& context) {
  const feature::Running running;
  WalkPass pass(model, plan, head, observer, routers.scope, context);
  pass.start_backward();
  std::vector<uint8_t> recomputed(plan.blocks.size(), 0);  // by block or round
  int64_t num_losses = 0;
  for (const trie::Entry& entry : plan.entries) {
    if (entry.action == trie::Action::kRecompute) recomputed[entry.block] = 1;
    if (entry.action == trie::Action::kLoss) ++num_losses;
  }
  const bool whole = scope == LossScope::kMiniBatch;
  const bool has_router_losses = routers.scope != nullptr && routers.scope->has_losses();
  // Ranks that bring weights together count their routers in passes of their own, so that none of
  // them waits for the others' counts in the middle of a pass of theirs; and so do stages, of which
  // no two go from forwards to backwards at one time.
  const bool counts_apart =
      has_router_losses && (walks_together(model) || model.stage() != nullptr);
  // Ranks that share experts go through the passes of all, also where only others score before.
  const bool goes_along = whole && model.expert_ranks() != nullptr;
  const bool scores_before =
      (whole && num_losses > 1) || counts_apart || (has_router_losses && goes_back_and_forth(plan));
  pass.start(counts_apart ? forwards_of(plan) : passes_of(plan, scores_before));
  bool done = false;  // the one loss of the whole mini-batch
  const auto whole_loss = [&] {
    const profile::PhaseScope phase(profile::Phase::kLoss);
    const std::vector<int32_t> samples = all_samples(plan);
    pass.take(samples, loss(samples, pass.outputs(samples)));
    done = true;
  };
  if (scores_before) {
    {
      const profile::PhaseScope phase(profile::Phase::kScore);
      pass.forward_all();
    }
    pass.stats.num_scored_before = plan.num_computed;
    if (whole && num_losses > 0) whole_loss();
  } else if (goes_along) {
    pass.idle_through_forwards();
  }
  if (counts_apart) {
    pass.finish();
    pass.close_routers(routers.ranks);
    pass.start(passes_of(plan, /*scored_before=*/false));
  }
  const auto ask_loss = [&](int32_t round) {
    if (whole) {
      if (!done) whole_loss();
      return;
    }
    const std::vector<int32_t> samples = pass.samples_of(round);
    if (samples.empty()) return;
    const profile::PhaseScope phase(profile::Phase::kLoss);
    pass.take(samples, loss(samples, pass.outputs(samples)));
  };
  for (const parallel::PipelineStep& step : pass.begin_steps(plan.entries)) {
    const int32_t round = step.round;
    if (round == parallel::kIdle) {
      pass.idle(step);
      continue;
    }
    switch (step.action) {
      case trie::Action::kForward: {
        const profile::PhaseScope phase(profile::Phase::kForward);
        pass.forward(round, step.chunk, recomputed[round] ? Keep::kInput : Keep::kAll);
        break;
      }
      case trie::Action::kLoss:
        ask_loss(round);
        break;
      case trie::Action::kRecompute: {
        const profile::PhaseScope phase(profile::Phase::kRecompute);
        pass.recompute(round, step.chunk);
        break;
      }
      case trie::Action::kBackward: {
        const profile::PhaseScope phase(profile::Phase::kBackward);
        if (has_router_losses && !routers.scope->is_closed()) pass.close_routers(routers.ranks);
        pass.backward(round, step.chunk);
        break;
      }
    }
  }
  pass.finish();
  pass.end_steps();
  pass.tell_heads();
  if (!pass.has_head()) {
    for (const trie::Entry& entry : plan.entries) {
      if (entry.action == trie::Action::kLoss) ask_loss(entry.block);
    }
  }
  if (routers.scope != nullptr && !routers.scope->is_closed()) pass.close_routers(routers.ranks);
  return pass.stats;
}

SampleScores score_samples(models::CausalLM& model,
                           const trie::Plan& plan,
                           const HeadSpec& head,
                           PassObserver* observer,
                           const ContextGroup& context) {
  const profile::PhaseScope phase(profile::Phase::kScore);
  const feature::Running running;
  WalkPass pass(model, plan, head, observer, /*routers=*/nullptr, context);
  pass.start(forwards_of(plan));
  pass.forward_all();
  pass.finish();
  if (observer != nullptr) pass.outputs(all_samples(plan));
  SampleScores out;
  const auto gather = [&](int32_t sample, HeadNumbers::Kind kind, std::vector<at::Tensor>& to) {
    if (pass.numbers().has(kind)) to.push_back(pass.numbers().gather({sample}, kind));
  };
  for (const int32_t s : all_samples(plan)) {
    gather(s, HeadNumbers::Kind::kValue, out.value);
    gather(s, HeadNumbers::Kind::kEntropy, out.entropy);
    gather(s, HeadNumbers::Kind::kSumSquares, out.sum_squares);
  }
  return out;
}

}  // namespace banyan::train
