#include "banyan/train/walk.h"

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
#include "banyan/train/detail/head_numbers.h"
#include "banyan/train/detail/logical_gradients.h"
#include "banyan/train/pipeline_pass.h"

namespace banyan::train {
namespace {

struct BlockState {
  ops::CarryStore store;  // what the block offers
  // From a forward that keeps activations to the backward, by chunk of the model; one of those that
  // other stages feed keeps its input alone where the body is made again.
  std::vector<BlockBody> bodies;
  std::vector<at::Tensor> inputs;
  BlockHead head;

  bool is_live() const {
    return std::any_of(
        bodies.begin(), bodies.end(), [](const BlockBody& body) { return body.saved != nullptr; });
  }
};

// What a forward leaves for the backward.
enum class Keep : uint8_t { kNothing, kInput, kAll };

using detail::HeadNumbers;

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
        numbers_(plan, spec, model.head_kind(), number_type(model.options().dtype)),
        pipeline_(model,
                  plan,
                  [this](int32_t round) { return context_.part(context_.own(round)).num_own(); }),
        context_(context, plan, model, [this](int32_t b) { return &states_[b].store; }) {
    model_.set_router_scope(routers);
    if (model_.expert_ranks() != nullptr) {
      lockstep_.emplace(*model_.expert_ranks(), [this](Pass pass) { model_.idle(pass); });
    }
    for (BlockState& state : states_) {
      state.bodies.resize(pipeline_.num_chunks());
      state.inputs.resize(pipeline_.num_chunks());
    }
    BANYAN_ASSERT(pipeline_.is_alone() || (keeper_ == nullptr && !lockstep_),
                  "a pipeline with weights in parts or experts over ranks");
    BANYAN_CHECK(
        !lockstep_ || !context_.has_idle(),
        "[parallel] context_parallel_size: wanted at most the tokens of a mini-batch where "
        "experts are dealt out over ranks, got more than ",
        plan.num_unique);
  }
  ~Walk() { model_.set_router_scope(nullptr); }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  void forward(int32_t round, int32_t chunk, Keep keep) {
    run_forward(round, chunk, keep, /*recompute=*/false);
    stats.forward_seconds += clock_.lap();
  }

  // What this rank runs of these entries, in order; end_steps when it has.
  const parallel::PipelineSteps& begin_steps(const std::vector<trie::Entry>& entries) {
    return pipeline_.begin(entries);
  }
  void end_steps() { pipeline_.end(); }
  // (all) Closes what the routers counted, over these ranks and those of the other stages.
  void close_routers(parallel::Collectives* ranks) { routers_->close(ranks, pipeline_.stages()); }
  // True where losses are asked for as their tokens have run; elsewhere the numbers come later.
  bool has_head() const { return pipeline_.has_head(); }

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
    std::vector<trie::Entry> entries;
    for (int32_t round = 0; round < num_rounds; ++round) {
      entries.push_back({trie::Action::kForward, round});
    }
    for (const parallel::PipelineStep& step : begin_steps(entries)) {
      forward(step.block, step.chunk, Keep::kNothing);
      if (step.chunk + 1 < pipeline_.num_chunks()) continue;
      for (int32_t earlier = 0; earlier <= step.block; ++earlier) {
        if (last_reader[earlier] == step.block) drop_stores(earlier);
      }
    }
    end_steps();
    tell_heads();
  }

  // (all) The numbers of all heads from the last stage to the others, once.
  void tell_heads() {
    if (pipeline_.is_alone() || is_told_) return;
    is_told_ = true;
    at::Tensor all = numbers_.packed();
    pipeline_.tell(all);
    if (!has_head()) numbers_.unpack(all);
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

  const HeadNumbers& numbers() const { return numbers_; }

  TokenOutputs outputs(const std::vector<int32_t>& samples) const {
    TokenOutputs out;
    out.value = numbers_.gather(samples, HeadNumbers::Kind::kValue);
    if (numbers_.has(HeadNumbers::Kind::kEntropy)) {
      out.entropy = numbers_.gather(samples, HeadNumbers::Kind::kEntropy);
    }
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

  // Puts the gradients of `samples` where their blocks find them; where there are no heads nobody
  // asks for them.
  void take(const std::vector<int32_t>& samples, const TokenGradients& gradients) {
    if (has_head()) gradients_->take(samples, gradients);
  }

  void recompute(int32_t round, int32_t chunk) {
    if (!context_.is_idle(round) && chunk == 0) {
      stats.num_recomputed += context_.part(context_.own(round)).num_own();
    }
    run_forward(round, chunk, Keep::kAll, /*recompute=*/true);
    stats.recompute_seconds += clock_.lap();
  }

  // The first chunk of a block is the last to go back.
  void backward(int32_t round, int32_t chunk) {
    if (context_.is_idle(round)) {
      if (keeper_ != nullptr) keeper_->begin(Pass::kBackward);
      context_.idle_backward(round, chunk);
      if (keeper_ != nullptr) keeper_->end(Pass::kBackward);
    } else {
      backward_of(context_.own(round), chunk);
    }
    if (chunk == 0) drop_stores(round);
  }

  WalkStats stats;

 private:
  void backward_of(int32_t b, int32_t chunk) {
    BlockState& state = states_[b];
    BlockBody& body = state.bodies[chunk];
    BANYAN_ASSERT(body.saved != nullptr, "backward of block ", b, " before its forward");
    clock_.lap();
    measure(body.backward_bytes() - body.bytes());
    BlockBody own = std::move(body);
    body = {};
    at::Tensor grad;
    if (keeper_ != nullptr) keeper_->begin(Pass::kBackward);
    if (lockstep_) lockstep_->begin(Pass::kBackward);
    if (pipeline_.is_last(chunk)) {
      grad = backward_of_head(b, own);
    } else {
      grad = pipeline_.receive_gradient(context_.round_of(b), chunk);
    }
    grad = backward_body(model_, std::move(own), grad, chunk);
    if (keeper_ != nullptr) keeper_->end(Pass::kBackward);
    if (!pipeline_.is_first(chunk)) pipeline_.send_gradient(context_.round_of(b), chunk, grad);
    measure();
    stats.backward_seconds += clock_.lap();
  }

  at::Tensor backward_of_head(int32_t b, BlockBody& body) {
    BANYAN_ASSERT(gradients_->pending(b) == 0,
                  "backward of block ",
                  b,
                  " before its losses: ",
                  gradients_->pending(b),
                  " tokens wait");
    HeadGradients gradients;
    const bool on_edges = numbers_.on_edges(HeadNumbers::Kind::kValue);
    (on_edges ? gradients.edge : gradients.row) =
        context_.of_part(b, gradients_->of_values(b, on_edges), on_edges);
    gradients.entropy = context_.of_part(b, gradients_->of_entropies(b), /*on_edges=*/false);
    const BlockHead head = std::move(states_[b].head);
    states_[b].head = {};
    return backward_head(model_, context_.part(b), body, head, gradients, spec_, &head_memory_);
  }

  void drop_stores(int32_t round) {
    for (int32_t b = context_.begin(round); b < context_.end(round); ++b) states_[b].store = {};
  }

  // Forward of a round; the heads too, unless an earlier pass left their numbers.
  void run_forward(int32_t round, int32_t chunk, Keep keep, bool recompute) {
    clock_.lap();
    const bool with_heads = !numbers_.is_there(context_.begin(round));
    if (context_.is_idle(round)) {
      if (keeper_ != nullptr) keeper_->begin(Pass::kForward);
      context_.idle_forward(round, chunk);
      if (keeper_ != nullptr) keeper_->end(Pass::kForward);
    } else {
      run_forward_of(context_.own(round), round, chunk, keep, recompute);
    }
    if (!context_.is_alone() && with_heads && pipeline_.is_last(chunk)) tell_numbers(round);
  }

  std::unique_ptr<AttentionContext> attention_of(int32_t b, int32_t round, bool recompute) {
    std::unique_ptr<AttentionContext> attention = std::make_unique<ops::TrieAttention>(
        plan_.blocks[b].trie, model_.options(), carry_of(b), memory_);
    if (observer_ != nullptr) attention = observer_->watch(b, recompute, std::move(attention));
    return context_.around(round, std::move(attention));
  }

  // Rows of the stage before; undefined where the input are ids.
  at::Tensor input_of(int32_t b, int32_t round, int32_t chunk, Keep keep, bool recompute) {
    if (pipeline_.is_first(chunk)) return {};
    at::Tensor& kept = states_[b].inputs[chunk];
    if (recompute) return std::exchange(kept, at::Tensor());
    at::Tensor rows = pipeline_.receive_rows(round, chunk);
    if (keep == Keep::kInput) kept = rows;
    return rows;
  }

  void run_forward_of(int32_t b, int32_t round, int32_t chunk, Keep keep, bool recompute) {
    BlockState& state = states_[b];
    const trie::Block& block = context_.part(b);
    const bool keeps_all = keep == Keep::kAll;
    const at::Tensor input = input_of(b, round, chunk, keep, recompute);
    if (keeper_ != nullptr) keeper_->begin(Pass::kForward);
    if (lockstep_) lockstep_->begin(Pass::kForward);
    if (routers_ != nullptr && !routers_->is_closed()) {
      // Of its forwards the first is counted.
      const bool is_first = pipeline_.is_alone() ? !numbers_.is_there(b) : !recompute && !is_told_;
      routers_->set_counting(is_first);
    }
    BlockBody body =
        forward_body(model_, block, attention_of(b, round, recompute), keeps_all, chunk, input);
    if (routers_ != nullptr) routers_->set_counting(false);
    const at::Tensor rows = std::exchange(body.rows, at::Tensor());
    if (rows.defined()) {
      if (!recompute) pipeline_.send_rows(round, chunk, rows);
    } else if (!numbers_.is_there(b)) {
      // Held until the next forward, which is enough for a block whose backward comes before that.
      state.head =
          forward_head(model_, block, body.row_hidden, spec_, keeps_all ? &head_memory_ : nullptr);
      numbers_.put(b, state.head);
    }
    if (keeper_ != nullptr) keeper_->end(Pass::kForward);
    if (keeps_all) state.bodies[chunk] = std::move(body);
    measure();
  }

  // What each rank's head gave in a round -> all ranks.
  void tell_numbers(int32_t round) {
    const int32_t own = context_.own(round);
    for (const HeadNumbers::Kind kind : numbers_.kinds()) {
      const at::Tensor mine = own >= 0 ? numbers_.of(own, kind) : at::Tensor();
      const std::vector<at::Tensor> all = context_.tell(round, mine, numbers_.on_edges(kind));
      for (size_t i = 0; i < all.size(); ++i) {
        numbers_.put(context_.begin(round) + static_cast<int32_t>(i), kind, all[i]);
      }
    }
    for (int32_t b = context_.begin(round); b < context_.end(round); ++b) numbers_.set_there(b);
  }

  static at::ScalarType number_type(at::ScalarType compute) {
    return compute == at::kDouble ? at::kDouble : at::kFloat;
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
      if (states_[b].is_live()) {
        tokens += context_.part(static_cast<int32_t>(b)).num_own();
      }
      for (const BlockBody& body : states_[b].bodies) activations += body.bytes();
      for (const at::Tensor& input : states_[b].inputs) {
        if (input.defined()) activations += static_cast<int64_t>(input.nbytes());
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
  HeadNumbers numbers_;
  PipelinePass pipeline_;
  ContextPass context_;
  bool is_told_ = false;  // the numbers of the heads, to all stages
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
  // them waits for the others' counts in the middle of a pass of theirs; and so do stages, of which
  // no two go from forwards to backwards at one time.
  const bool counts_apart =
      has_router_losses && (walks_together(model) || model.stage() != nullptr);
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
    pass.close_routers(routers.ranks);
    pass.start(passes_of(plan, /*scored_before=*/false));
  }
  const auto ask_loss = [&](int32_t b) {
    if (whole) {
      if (!done) whole_loss();
      return;
    }
    const std::vector<int32_t> samples = pass.samples_of(b);
    if (samples.empty()) return;
    const profile::PhaseScope phase(profile::Phase::kLoss);
    pass.take(samples, loss(samples, pass.outputs(samples)));
  };
  for (const parallel::PipelineStep& step : pass.begin_steps(plan.entries)) {
    const int32_t b = step.block;
    switch (step.action) {
      case trie::Action::kForward: {
        const profile::PhaseScope phase(profile::Phase::kForward);
        pass.forward(b, step.chunk, recomputed[b] ? Keep::kInput : Keep::kAll);
        break;
      }
      case trie::Action::kLoss:
        ask_loss(b);
        break;
      case trie::Action::kRecompute: {
        const profile::PhaseScope phase(profile::Phase::kRecompute);
        pass.recompute(b, step.chunk);
        break;
      }
      case trie::Action::kBackward: {
        const profile::PhaseScope phase(profile::Phase::kBackward);
        if (has_router_losses && !routers.scope->is_closed()) pass.close_routers(routers.ranks);
        pass.backward(b, step.chunk);
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
  Walk pass(model, plan, head, observer, /*routers=*/nullptr, context);
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
