// One walk in progress (train/walk.h): what each block has kept, the passes of its rounds over the
// ranks that compute them together, stage by stage where the model lies in stages, and what was
// measured. walk() decides what comes when.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "banyan/core/param_keeper.h"
#include "banyan/ops/carry.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/train/clock.h"
#include "banyan/train/context_pass.h"
#include "banyan/train/detail/head_numbers.h"
#include "banyan/train/detail/logical_gradients.h"
#include "banyan/train/pipeline_pass.h"
#include "banyan/train/walk.h"

namespace banyan::train::detail {

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

class WalkPass {
 public:
  WalkPass(models::CausalLM& model,
           const trie::Plan& plan,
           const HeadSpec& spec,
           PassObserver* observer,
           nn::RouterScope* routers = nullptr,
           const ContextGroup& context = {});
  ~WalkPass() { model_.set_router_scope(nullptr); }
  WalkPass(const WalkPass&) = delete;
  WalkPass& operator=(const WalkPass&) = delete;

  void forward(int32_t round, int32_t chunk, Keep keep);

  // (all) What this rank runs of these entries, in order; end_steps when it has.
  const parallel::PipelineSteps& begin_steps(const std::vector<trie::Entry>& entries);
  void end_steps() { pipeline_.end(); }
  // (all) Closes what the routers counted, over these ranks and those of the other stages.
  void close_routers(parallel::Collectives* ranks) { routers_->close(ranks, pipeline_.stages()); }
  // True where losses are asked for as their tokens have run; elsewhere the numbers come later.
  bool has_head() const { return pipeline_.has_head(); }

  // Tells a keeper of the weights which passes come (core/param_keeper.h).
  void start(const std::string& passes);
  // Goes with the other ranks through theirs.
  void finish();

  // A step without a block: this rank's part in one of others.
  void idle(const parallel::PipelineStep& step);

  // Forward of all blocks, nothing kept but the heads; K and V go with their last reader.
  void forward_all();
  // In its place, where others do that.
  void idle_through_forwards();

  // (all) The numbers of all heads from the last stage to the others, once.
  void tell_heads();

  // The samples whose last token lies in a round.
  std::vector<int32_t> samples_of(int32_t round) const;

  const HeadNumbers& numbers() const { return numbers_; }

  TokenOutputs outputs(const std::vector<int32_t>& samples) const;

  void start_backward();

  // Puts the gradients of `samples` where their blocks find them; where there are no heads nobody
  // asks for them.
  void take(const std::vector<int32_t>& samples, const TokenGradients& gradients);

  void recompute(int32_t round, int32_t chunk);

  // The first chunk of a block is the last to go back.
  void backward(int32_t round, int32_t chunk);

  WalkStats stats;

 private:
  // Around what the weights are needed for, with the other ranks.
  void begin_pass(Pass pass);
  void end_pass(Pass pass);

  void backward_of(int32_t b, int32_t chunk);

  at::Tensor backward_of_head(int32_t b, BlockBody& body);

  void drop_stores(int32_t round);

  // Forward of a round; the heads too, unless an earlier pass left their numbers.
  void run_forward(int32_t round, int32_t chunk, Keep keep, bool recompute);

  std::unique_ptr<AttentionContext> attention_of(int32_t b, int32_t round, bool recompute);

  // Rows of the stage before; undefined where the input are ids.
  at::Tensor input_of(int32_t b, int32_t round, int32_t chunk, Keep keep, bool recompute);

  void run_forward_of(int32_t b, int32_t round, int32_t chunk, Keep keep, bool recompute);

  // What each rank's head gave in a round -> all ranks.
  void tell_numbers(int32_t round);

  static at::ScalarType number_type(at::ScalarType compute);

  ops::BlockCarry carry_of(int32_t b);

  // `again_bytes`: of activations that the backward in progress computes again.
  void measure(int64_t again_bytes = 0);

  models::CausalLM& model_;
  const trie::Plan& plan_;
  const HeadSpec& spec_;
  PassObserver* observer_;
  ParamKeeper* keeper_ = model_.params().keeper();
  nn::RouterScope* routers_;
  Clock clock_;
  std::shared_ptr<ops::AttentionMemory> memory_ = ops::make_attention_memory();
  ops::HeadMemory head_memory_;
  std::vector<BlockState> states_;
  HeadNumbers numbers_;
  PipelinePass pipeline_;
  ContextPass context_;
  bool is_told_ = false;  // the numbers of the heads, to all stages
  std::optional<LogicalGradients> gradients_;
};

}  // namespace banyan::train::detail
