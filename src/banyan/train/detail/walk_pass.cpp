#include "banyan/train/detail/walk_pass.h"

#include <numeric>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::train::detail {

WalkPass::WalkPass(models::CausalLM& model,
                   const trie::Plan& plan,
                   const HeadSpec& spec,
                   PassObserver* observer,
                   nn::RouterScope* routers,
                   const ContextGroup& context)
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
  for (BlockState& state : states_) {
    state.bodies.resize(pipeline_.num_chunks());
    state.inputs.resize(pipeline_.num_chunks());
  }
  BANYAN_ASSERT(pipeline_.is_alone() || keeper_ == nullptr, "a pipeline with weights in parts");
  BANYAN_CHECK(
      model_.expert_ranks() == nullptr || !context_.has_idle(),
      "[config] actor_rollout_ref.actor.megatron.context_parallel_size: wanted at most the "
      "tokens of a mini-batch where experts are dealt out over ranks, got more than ",
      plan.num_unique);
}

void WalkPass::forward(int32_t round, int32_t chunk, Keep keep) {
  run_forward(round, chunk, keep, /*recompute=*/false);
  stats.forward_seconds += clock_.lap();
}

const parallel::PipelineSteps& WalkPass::begin_steps(const std::vector<trie::Entry>& entries) {
  return pipeline_.begin(entries);
}

void WalkPass::start(const std::string& passes) {
  if (keeper_ != nullptr) keeper_->start(passes);
}

void WalkPass::finish() {
  if (keeper_ != nullptr) keeper_->finish();
}

void WalkPass::idle(const parallel::PipelineStep& step) {
  model_.idle(step.action == trie::Action::kBackward ? Pass::kBackward : Pass::kForward,
              step.chunk);
}

void WalkPass::idle_through_forwards() {
  for (const parallel::PipelineStep& step : begin_steps({})) idle(step);
  end_steps();
}

void WalkPass::forward_all() {
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
    if (step.round == parallel::kIdle) {
      idle(step);
      continue;
    }
    forward(step.round, step.chunk, Keep::kNothing);
    if (step.chunk + 1 < pipeline_.num_chunks()) continue;
    for (int32_t earlier = 0; earlier <= step.round; ++earlier) {
      if (last_reader[earlier] == step.round) drop_stores(earlier);
    }
  }
  end_steps();
  tell_heads();
}

void WalkPass::tell_heads() {
  if (pipeline_.is_alone() || is_told_ || plan_.blocks.empty()) return;
  is_told_ = true;
  at::Tensor all = numbers_.packed();
  pipeline_.tell(all);
  if (!has_head()) numbers_.unpack(all);
}

std::vector<int32_t> WalkPass::samples_of(int32_t round) const {
  std::vector<int32_t> samples;
  for (int32_t b = context_.begin(round); b < context_.end(round); ++b) {
    const std::vector<int32_t>& of_block = plan_.blocks[b].samples;
    samples.insert(samples.end(), of_block.begin(), of_block.end());
  }
  return samples;
}

TokenOutputs WalkPass::outputs(const std::vector<int32_t>& samples) const {
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

void WalkPass::start_backward() {
  model_.params().ensure_grads();
  gradients_.emplace(plan_);
}

void WalkPass::take(const std::vector<int32_t>& samples, const TokenGradients& gradients) {
  if (has_head()) gradients_->take(samples, gradients);
}

void WalkPass::recompute(int32_t round, int32_t chunk) {
  if (!context_.is_idle(round) && chunk == 0) {
    stats.num_recomputed += context_.part(context_.own(round)).num_own();
  }
  run_forward(round, chunk, Keep::kAll, /*recompute=*/true);
  stats.recompute_seconds += clock_.lap();
}

void WalkPass::backward(int32_t round, int32_t chunk) {
  if (context_.is_idle(round)) {
    begin_pass(Pass::kBackward);
    context_.idle_backward(round, chunk);
    end_pass(Pass::kBackward);
  } else {
    backward_of(context_.own(round), chunk);
  }
  if (chunk == 0) drop_stores(round);
}

void WalkPass::begin_pass(Pass pass) {
  if (keeper_ != nullptr) keeper_->begin(pass);
}

void WalkPass::end_pass(Pass pass) {
  if (keeper_ != nullptr) keeper_->end(pass);
}

void WalkPass::backward_of(int32_t b, int32_t chunk) {
  BlockState& state = states_[b];
  BlockBody& body = state.bodies[chunk];
  BANYAN_ASSERT(body.saved != nullptr, "backward of block ", b, " before its forward");
  clock_.lap();
  measure(body.backward_bytes() - body.bytes());
  BlockBody own = std::move(body);
  body = {};
  at::Tensor grad;
  begin_pass(Pass::kBackward);
  if (pipeline_.is_last(chunk)) {
    grad = backward_of_head(b, own);
  } else {
    grad = pipeline_.receive_gradient(context_.round_of(b), chunk);
  }
  grad = backward_body(model_, std::move(own), grad, chunk);
  end_pass(Pass::kBackward);
  if (!pipeline_.is_first(chunk)) pipeline_.send_gradient(context_.round_of(b), chunk, grad);
  measure();
  stats.backward_seconds += clock_.lap();
}

at::Tensor WalkPass::backward_of_head(int32_t b, BlockBody& body) {
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

void WalkPass::drop_stores(int32_t round) {
  for (int32_t b = context_.begin(round); b < context_.end(round); ++b) states_[b].store = {};
}

void WalkPass::run_forward(int32_t round, int32_t chunk, Keep keep, bool recompute) {
  clock_.lap();
  const bool with_heads = !numbers_.is_there(context_.begin(round));
  if (context_.is_idle(round)) {
    begin_pass(Pass::kForward);
    context_.idle_forward(round, chunk);
    end_pass(Pass::kForward);
  } else {
    run_forward_of(context_.own(round), round, chunk, keep, recompute);
  }
  if (!context_.is_alone() && with_heads && pipeline_.is_last(chunk)) tell_numbers(round);
}

std::unique_ptr<AttentionContext> WalkPass::attention_of(int32_t b, int32_t round, bool recompute) {
  std::unique_ptr<AttentionContext> attention = std::make_unique<ops::TrieAttention>(
      plan_.blocks[b].trie, model_.options(), carry_of(b), memory_);
  if (observer_ != nullptr) attention = observer_->watch(b, recompute, std::move(attention));
  return context_.around(round, std::move(attention));
}

at::Tensor WalkPass::input_of(int32_t b, int32_t round, int32_t chunk, Keep keep, bool recompute) {
  if (pipeline_.is_first(chunk)) return {};
  at::Tensor& kept = states_[b].inputs[chunk];
  if (recompute) return std::exchange(kept, at::Tensor());
  at::Tensor rows = pipeline_.receive_rows(round, chunk);
  if (keep == Keep::kInput) kept = rows;
  return rows;
}

void WalkPass::run_forward_of(int32_t b, int32_t round, int32_t chunk, Keep keep, bool recompute) {
  BlockState& state = states_[b];
  const trie::Block& block = context_.part(b);
  const bool keeps_all = keep == Keep::kAll;
  const at::Tensor input = input_of(b, round, chunk, keep, recompute);
  begin_pass(Pass::kForward);
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
  end_pass(Pass::kForward);
  if (keeps_all) state.bodies[chunk] = std::move(body);
  measure();
}

void WalkPass::tell_numbers(int32_t round) {
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

at::ScalarType WalkPass::number_type(at::ScalarType compute) {
  return compute == at::kDouble ? at::kDouble : at::kFloat;
}

ops::BlockCarry WalkPass::carry_of(int32_t b) {
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

void WalkPass::measure(int64_t again_bytes) {
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

}  // namespace banyan::train::detail
