// The slots of the ops (feature/slot.h): every call of an op of this folder looks here first, in
// training, scoring and rollout alike, and calls the original where nothing is registered.
//
// The fields of an op have the signatures and contracts of its functions. What a changed op returns
// is checked for shape, type and device; [feature] names the slot and who stands in it.
//
// The rollout's native pass (kernels/cpu/decoder_pass.h) does not go through ops one by one: while
// one of the ops of the body is changed, the rollout runs the plain path over them instead, so that
// it computes what training computes. The token draw reads the head's own logits whatever stands in
// cross_entropy, which is training's.
#pragma once

#include <functional>

#include "banyan/core/attention_context.h"
#include "banyan/feature/slot_table.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/ops/linear.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/rope.h"
#include "banyan/ops/swiglu.h"
#include "banyan/ops/value_head.h"

namespace banyan::ops {

struct RmsNormOp {
  std::function<decltype(rms_norm_forward)> forward;
  std::function<decltype(rms_norm_backward)> backward;
};

struct RopeOp {
  std::function<decltype(rope_forward)> forward;
  std::function<decltype(rope_backward)> backward;
};

struct SwigluOp {
  std::function<decltype(swiglu_forward)> forward;
  std::function<decltype(swiglu_backward)> backward;
};

struct LinearOp {
  std::function<decltype(linear_forward)> forward;
  std::function<decltype(linear_backward_input)> backward_input;
  std::function<decltype(linear_backward_weight)> backward_weight;
};

struct EmbeddingOp {
  std::function<decltype(embedding_forward)> forward;
  std::function<decltype(embedding_backward)> backward;
};

struct CrossEntropyOp {
  std::function<decltype(edge_logprob_forward)> forward;
  std::function<decltype(edge_logprob_backward)> backward;
};

struct ValueHeadOp {
  std::function<decltype(value_head_forward)> forward;
  std::function<decltype(value_head_backward)> backward;
};

// --- attention: over a trie in training and scoring, over the pages of a sequence in rollout ---

struct AttentionResult {
  at::Tensor out;  // [T, H, D] like q
  at::Tensor lse;  // [T, H] accumulate type; may be undefined where backward does not want it
};

struct AttentionSlotGradients {
  at::Tensor dq;  // [T, H, D]
  at::Tensor dk;  // [C + T, K, D], of every key
  at::Tensor dv;
  // The original's: it has added the carried part where it belongs; dk and dv are of own tokens.
  bool is_settled = false;
};

// One call; good while it runs.
struct AttentionCall {
  int64_t layer = 0;
  at::Tensor q;       // [T, H, D] after norm and RoPE; query head h reads kv head h / (H / K)
  at::Tensor k;       // [C + T, K, D]: C tokens that are keys only, then those of q
  at::Tensor v;       // likewise; the original reads their own rows from here and the carried ones
                      // where they lie
  at::Tensor parent;  // [C + T] int32 on the CPU: the token before on its path, -1 at a root. A
                      // token attends itself and all tokens that lead to it
  double scale = 1.0;
  std::function<AttentionResult(const AttentionCall&)> own_forward = {};
  std::function<AttentionSlotGradients(const AttentionCall&,
                                       const at::Tensor& grad_out,
                                       const at::Tensor& out,
                                       const at::Tensor& lse)>
      own_backward = {};
};

struct AttentionOp {
  std::function<AttentionResult(const AttentionCall& call)> forward;
  std::function<AttentionSlotGradients(const AttentionCall& call,
                                       const at::Tensor& grad_out,
                                       const at::Tensor& out,
                                       const at::Tensor& lse)>
      backward;
};

feature::OpSlot<RmsNormOp>& rms_norm_slot();
feature::OpSlot<RopeOp>& rope_slot();
feature::OpSlot<SwigluOp>& swiglu_slot();
feature::OpSlot<LinearOp>& linear_slot();
feature::OpSlot<EmbeddingOp>& embedding_slot();
feature::OpSlot<CrossEntropyOp>& cross_entropy_slot();
feature::OpSlot<ValueHeadOp>& value_head_slot();
feature::OpSlot<AttentionOp>& attention_slot();

// All of them: attention, rms_norm, rope, swiglu, linear, embedding, cross_entropy, value_head, and
// those of experts (ops/expert_slots.h).
const feature::SlotTable& slot_table();

// True while an op of the decoder's body is changed: the rollout takes the plain path.
bool is_body_changed();

// Counts their changes: what was computed under another count is of other ops.
int64_t body_generation();

// W [out, in] in the compute dtype, unpacked if need be (a copy, so its cost is that of reading W).
at::Tensor plain_weight(const LinearWeight& weight);

// The tensor that the changed op of a slot returned, contiguous; throws [feature] unless it has
// this shape and the type and device of `like`.
at::Tensor slot_result(const feature::SlotBase& slot,
                       const char* what,
                       const at::Tensor& got,
                       at::IntArrayRef sizes,
                       const at::Tensor& like);

}  // namespace banyan::ops
