#include "banyan/train/walk.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/feature/running.h"
#include "banyan/ops/carry.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/parallel/lockstep.h"
#include "banyan/train/clock.h"
#include "banyan/train/detail/logical_gradients.h"

namespace banyan::train {
namespace {

// The numbers of one block's head, fp64 on the CPU (exact copies).
struct HeadNumbers {
  at::Tensor value;        // [X] log-probabilities, or [R] values
  at::Tensor entropy;      // [R]
  at::Tensor sum_squares;  // [R]
};

struct BlockState {
  ops::CarryStore store;  // what the block offers
  BlockBody body;         // from a forward that keeps activations to the backward
  BlockHead head;
  HeadNumbers numbers;
  bool has_head = false;
  bool live = false;  // `body` holds activations
};

at::Tensor to_double(const at::Tensor& x) {
  return x.defined() ? x.to(at::kCPU, at::kDouble).contiguous() : at::Tensor();
}

class Walk {
 public:
  Walk(models::CausalLM& model,
       const trie::Plan& plan,
       const HeadSpec& spec,
       PassObserver* observer,
       nn::RouterScope* routers = nullptr,
       const ContextGroup& context = {})
      : model_(model),
        plan_(plan),
        spec_(spec),
        observer_(observer),
        routers_(routers),
        states_(plan.blocks.size()),
        context_(context, plan, model, [this](int32_t b) { return &states_[b].store; }) {
    model_.set_router_scope(routers);
    if (model_.expert_ranks() != nullptr) {
      lockstep_.emplace(*model_.expert_ranks(), [this](Pass pass) { model_.idle(pass); });
    }
    BANYAN_ASSERT(context_.is_alone() || !lockstep_, "context parallel with experts over ranks");
  }
  ~Walk() { model_.set_router_scope(nullptr); }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  void forward(int32_t round, bool keep) {
    run_forward(round, keep, /*recompute=*/false);
    stats.forward_seconds += clock_.lap();
  }

  // Tells a keeper of the weights which passes come (core/param_keeper.h).
  void start(const std::string& passes) {
    if (keeper_ != nullptr) keeper_->start(passes);
    if (lockstep_) lockstep_->start(passes);
  }
  // Goes with the other ranks through theirs.
  void finish() {
    if (keeper_ != nullptr) keeper_->finish();
    if (lockstep_) lockstep_->finish();
  }

  // Forward of all blocks, nothing kept but the heads; K and V go with their last reader.
  void forward_all() {
    const int32_t num_rounds = context_.num_rounds();
    std::vector<int32_t> last_reader(num_rounds);
    std::iota(last_reader.begin(), last_reader.end(), 0);
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      for (const trie::Carried& carried : plan_.blocks[b].carried) {
        last_reader[context_.round_of(carried.block)] = context_.round_of(static_cast<int32_t>(b));
      }
    }
    for (int32_t round = 0; round < num_rounds; ++round) {
      forward(round, /*keep=*/false);
      for (int32_t earlier = 0; earlier <= round; ++earlier) {
        if (last_reader[earlier] == round) drop_stores(earlier);
      }
    }
  }

  // The samples whose last token lies in a round.
  std::vector<int32_t> samples_of(int32_t round) const {
    std::vector<int32_t> samples;
    for (int32_t b = context_.begin(round); b < context_.end(round); ++b) {
      const std::vector<int32_t>& of_block = plan_.blocks[b].samples;
      samples.insert(samples.end(), of_block.begin(), of_block.end());
    }
    return samples;
  }

  // The number of each logical token of `samples`, out of `which` of its block. Log-probabilities
  // lie on edges, everything else on rows.
  at::Tensor gather(const std::vector<int32_t>& samples, at::Tensor HeadNumbers::* which) const {
    const trie::LogicalTokens& logical = plan_.logical;
    const bool on_edges = which == &HeadNumbers::value && !has_value_head();
    int64_t total = 0;
    for (const int32_t s : samples) total += logical.offsets[s + 1] - logical.offsets[s];
    at::Tensor out = at::empty({total}, at::kDouble);
    double* to = out.data_ptr<double>();
    for (const int32_t s : samples) {
      for (int32_t u = logical.offsets[s]; u < logical.offsets[s + 1]; ++u) {
        const BlockState& state = states_[logical.block[u]];
        BANYAN_ASSERT(state.has_head, "the loss of sample ", s, " comes before its forward");
        *to++ = (state.numbers.*which)
                    .const_data_ptr<double>()[on_edges ? logical.edge[u] : logical.row[u]];
      }
    }
    return out.to(number_type());
  }

  TokenOutputs outputs(const std::vector<int32_t>& samples) const {
    TokenOutputs out;
    out.value = gather(samples, &HeadNumbers::value);
    if (has_entropy()) out.entropy = gather(samples, &HeadNumbers::entropy);
    out.offsets.push_back(0);
    for (const int32_t s : samples) {
      out.offsets.push_back(out.offsets.back() + plan_.logical.offsets[s + 1] -
                            plan_.logical.offsets[s]);
    }
    if (observer_ != nullptr) observer_->outputs(samples, out.offsets);
    return out;
  }

  void start_backward() {
    model_.params().ensure_grads();
    gradients_.emplace(plan_);
  }

  // Puts the gradients of `samples` where their blocks find them.
  void take(const std::vector<int32_t>& samples, const TokenGradients& gradients) {
    gradients_->take(samples, gradients);
  }

  void recompute(int32_t round) {
    if (!context_.is_idle(round)) {
      stats.num_recomputed += context_.part(context_.own(round)).num_own();
    }
    run_forward(round, /*keep=*/true, /*recompute=*/true);
    stats.recompute_seconds += clock_.lap();
  }

  void backward(int32_t round) {
    if (context_.is_idle(round)) {
      if (keeper_ != nullptr) keeper_->begin(Pass::kBackward);
      context_.idle_backward(round);
      if (keeper_ != nullptr) keeper_->end(Pass::kBackward);
    } else {
      backward_of(context_.own(round));
    }
    drop_stores(round);
  }

  WalkStats stats;

 private:
  void backward_of(int32_t b) {
    BlockState& state = states_[b];
    BANYAN_ASSERT(state.live && gradients_->pending(b) == 0,
                  "backward of block ",
                  b,
                  " before its forward or its losses: ",
                  gradients_->pending(b),
                  " tokens wait");
    clock_.lap();
    HeadGradients gradients;
    const bool on_edges = !has_value_head();
    (on_edges ? gradients.edge : gradients.row) =
        context_.of_part(b, gradients_->of_values(b, on_edges), on_edges);
    gradients.entropy = context_.of_part(b, gradients_->of_entropies(b), /*on_edges=*/false);
    measure(state.body.backward_bytes() - state.body.bytes());
    state.live = false;
    if (keeper_ != nullptr) keeper_->begin(Pass::kBackward);
    if (lockstep_) lockstep_->begin(Pass::kBackward);
    backward_block(model_,
                   context_.part(b),
                   std::move(state.body),
                   state.head,
                   gradients,
                   spec_,
                   &head_memory_);
    if (keeper_ != nullptr) keeper_->end(Pass::kBackward);
    measure();
    state.head = {};
    stats.backward_seconds += clock_.lap();
  }

  void drop_stores(int32_t round) {
    for (int32_t b = context_.begin(round); b < context_.end(round); ++b) states_[b].store = {};
  }

  // Forward of a round; the heads too, unless an earlier pass left their numbers.
  void run_forward(int32_t round, bool keep, bool recompute) {
    clock_.lap();
    const bool with_heads = !states_[context_.begin(round)].has_head;
    if (context_.is_idle(round)) {
      if (keeper_ != nullptr) keeper_->begin(Pass::kForward);
      context_.idle_forward(round);
      if (keeper_ != nullptr) keeper_->end(Pass::kForward);
    } else {
      run_forward_of(context_.own(round), round, keep, recompute);
    }
    if (!context_.is_alone() && with_heads) tell_numbers(round);
  }

  std::unique_ptr<AttentionContext> attention_of(int32_t b, int32_t round, bool recompute) {
    std::unique_ptr<AttentionContext> attention = std::make_unique<ops::TrieAttention>(
        plan_.blocks[b].trie, model_.options(), carry_of(b), memory_);
    if (observer_ != nullptr) attention = observer_->watch(b, recompute, std::move(attention));
    return context_.around(round, std::move(attention));
  }

  void run_forward_of(int32_t b, int32_t round, bool keep, bool recompute) {
    BlockState& state = states_[b];
    const trie::Block& block = context_.part(b);
    if (keeper_ != nullptr) keeper_->begin(Pass::kForward);
    if (lockstep_) lockstep_->begin(Pass::kForward);
    // Of its forwards one is counted.
    if (routers_ != nullptr && !routers_->is_closed()) routers_->set_counting(!state.has_head);
    BlockBody body = forward_body(model_, block, attention_of(b, round, recompute), keep);
    if (routers_ != nullptr) routers_->set_counting(false);
    if (!state.has_head) {
      // Held until the next forward, which is enough for a block whose backward comes before that.
      state.head =
          forward_head(model_, block, body.row_hidden, spec_, keep ? &head_memory_ : nullptr);
      state.numbers = {
          to_double(state.head.value.defined() ? state.head.value : state.head.edges.logprob),
          to_double(state.head.edges.entropy),
          to_double(state.head.sum_squares)};
      state.has_head = true;
    }
    if (keeper_ != nullptr) keeper_->end(Pass::kForward);
    if (keep) {
      state.body = std::move(body);
      state.live = true;
    }
    measure();
  }

  // What each rank's head gave in a round -> all ranks.
  void tell_numbers(int32_t round) {
    const int32_t own = context_.own(round);
    const auto tell = [&](at::Tensor HeadNumbers::* which, bool on_edges) {
      const at::Tensor mine = own >= 0 ? states_[own].numbers.*which : at::Tensor();
      const std::vector<at::Tensor> all = context_.tell(round, mine, on_edges);
      for (size_t i = 0; i < all.size(); ++i) {
        states_[context_.begin(round) + i].numbers.*which = all[i];
      }
    };
    tell(&HeadNumbers::value, /*on_edges=*/!has_value_head());
    if (has_entropy()) tell(&HeadNumbers::entropy, /*on_edges=*/false);
    if (spec_.with_sum_squares && !has_value_head()) {
      tell(&HeadNumbers::sum_squares, /*on_edges=*/false);
    }
    for (int32_t b = context_.begin(round); b < context_.end(round); ++b) {
      states_[b].has_head = true;
    }
  }

  bool has_value_head() const { return model_.head_kind() == models::HeadKind::kValue; }
  bool has_entropy() const { return spec_.with_entropy && !has_value_head(); }
  at::ScalarType number_type() const {
    return model_.options().dtype == at::kDouble ? at::kDouble : at::kFloat;
  }

  ops::BlockCarry carry_of(int32_t b) {
    const trie::Block& block = plan_.blocks[b];
    ops::BlockCarry carry;
    carry.num_carried = block.num_carried;
    for (const trie::Carried& carried : block.carried) {
      carry.sources.push_back({&states_[carried.block].store, carried.count});
    }
    if (block.offered.empty() || context_.offers()) return carry;
    carry.offered = block.offered;
    carry.out = &states_[b].store;
    return carry;
  }

  // `again_bytes`: of activations that the backward in progress computes again.
  void measure(int64_t again_bytes = 0) {
    int64_t tokens = 0;
    int64_t activations = again_bytes;
    int64_t carry = 0;
    for (size_t b = 0; b < states_.size(); ++b) {
      if (states_[b].live) {
        tokens += context_.part(static_cast<int32_t>(b)).num_own();
        activations += states_[b].body.bytes();
      }
      carry += states_[b].store.bytes();
    }
    stats.peak_live_tokens = std::max(stats.peak_live_tokens, tokens);
    stats.peak_activation_bytes = std::max(stats.peak_activation_bytes, activations);
    stats.peak_carry_bytes = std::max(stats.peak_carry_bytes, carry);
  }

  models::CausalLM& model_;
  const trie::Plan& plan_;
  const HeadSpec& spec_;
  PassObserver* observer_;
  ParamKeeper* keeper_ = model_.params().keeper();
  nn::RouterScope* routers_;
  std::optional<parallel::Lockstep> lockstep_;
  Clock clock_;
  std::shared_ptr<ops::AttentionMemory> memory_ = ops::make_attention_memory();
  ops::HeadMemory head_memory_;
  std::vector<BlockState> states_;
  ContextPass context_;
  std::optional<detail::LogicalGradients> gradients_;
};

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
  Walk pass(model, plan, head, observer, routers.scope, context);
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
  // them waits for the others' counts in the middle of a pass of theirs.
  const bool counts_apart = has_router_losses && walks_together(model);
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
  }
  if (counts_apart) {
    pass.finish();
    routers.scope->close(routers.ranks);
    pass.start(passes_of(plan, /*scored_before=*/false));
  }
  for (const trie::Entry& entry : plan.entries) {
    const int32_t b = entry.block;
    switch (entry.action) {
      case trie::Action::kForward: {
        const profile::PhaseScope phase(profile::Phase::kForward);
        pass.forward(b, /*keep=*/!recomputed[b]);
        break;
      }
      case trie::Action::kLoss:
        if (!whole) {
          const std::vector<int32_t> samples = pass.samples_of(b);
          if (samples.empty()) break;
          const profile::PhaseScope phase(profile::Phase::kLoss);
          pass.take(samples, loss(samples, pass.outputs(samples)));
        } else if (!done) {
          whole_loss();
        }
        break;
      case trie::Action::kRecompute: {
        const profile::PhaseScope phase(profile::Phase::kRecompute);
        pass.recompute(b);
        break;
      }
      case trie::Action::kBackward: {
        const profile::PhaseScope phase(profile::Phase::kBackward);
        if (has_router_losses && !routers.scope->is_closed()) routers.scope->close(routers.ranks);
        pass.backward(b);
        break;
      }
    }
  }
  pass.finish();
  if (routers.scope != nullptr && !routers.scope->is_closed()) routers.scope->close(routers.ranks);
  return pass.stats;
}

SampleScores score_samples(models::CausalLM& model,
                           const trie::Plan& plan,
                           const HeadSpec& head,
                           PassObserver* observer,
                           const ContextGroup& context) {
  const profile::PhaseScope phase(profile::Phase::kScore);
  const feature::Running running;
  Walk pass(model, plan, head, observer, /*routers=*/nullptr, context);
  pass.start(forwards_of(plan));
  pass.forward_all();
  pass.finish();
  if (observer != nullptr) pass.outputs(all_samples(plan));
  SampleScores out;
  const bool vocabulary = model.head_kind() == models::HeadKind::kVocabulary;
  for (const int32_t s : all_samples(plan)) {
    out.value.push_back(pass.gather({s}, &HeadNumbers::value));
    if (vocabulary && head.with_entropy) {
      out.entropy.push_back(pass.gather({s}, &HeadNumbers::entropy));
    }
    if (vocabulary && head.with_sum_squares) {
      out.sum_squares.push_back(pass.gather({s}, &HeadNumbers::sum_squares));
    }
  }
  return out;
}

}  // namespace banyan::train
