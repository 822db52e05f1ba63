// The ops as everyone calls them: the slot's chain if anything is registered, the original
// (detail/originals.h) otherwise. A slot outlives every thread that may call its op, so none is
// ever destroyed.
#include "banyan/ops/slots.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"
#include "banyan/ops/expert_slots.h"

namespace banyan::ops {

using feature::OpSlot;

OpSlot<RmsNormOp>& rms_norm_slot() {
  static auto* const slot =
      new OpSlot<RmsNormOp>("rms_norm", {&detail::rms_norm_forward, &detail::rms_norm_backward});
  return *slot;
}

OpSlot<RopeOp>& rope_slot() {
  static auto* const slot =
      new OpSlot<RopeOp>("rope", {&detail::rope_forward, &detail::rope_backward});
  return *slot;
}

OpSlot<SwigluOp>& swiglu_slot() {
  static auto* const slot =
      new OpSlot<SwigluOp>("swiglu", {&detail::swiglu_forward, &detail::swiglu_backward});
  return *slot;
}

OpSlot<LinearOp>& linear_slot() {
  static auto* const slot = new OpSlot<LinearOp>(
      "linear",
      {&detail::linear_forward, &detail::linear_backward_input, &detail::linear_backward_weight});
  return *slot;
}

OpSlot<EmbeddingOp>& embedding_slot() {
  static auto* const slot = new OpSlot<EmbeddingOp>(
      "embedding", {&detail::embedding_forward, &detail::embedding_backward});
  return *slot;
}

OpSlot<CrossEntropyOp>& cross_entropy_slot() {
  static auto* const slot = new OpSlot<CrossEntropyOp>(
      "cross_entropy", {&detail::edge_logprob_forward, &detail::edge_logprob_backward});
  return *slot;
}

OpSlot<ValueHeadOp>& value_head_slot() {
  static auto* const slot = new OpSlot<ValueHeadOp>(
      "value_head", {&detail::value_head_forward, &detail::value_head_backward});
  return *slot;
}

OpSlot<AttentionOp>& attention_slot() {
  static auto* const slot = new OpSlot<AttentionOp>(
      "attention",
      {[](const AttentionCall& call) { return call.own_forward(call); },
       [](const AttentionCall& call,
          const at::Tensor& grad_out,
          const at::Tensor& out,
          const at::Tensor& lse) { return call.own_backward(call, grad_out, out, lse); }});
  return *slot;
}

const feature::SlotTable& slot_table() {
  static const auto* const table = new feature::SlotTable({&attention_slot(),
                                                           &rms_norm_slot(),
                                                           &rope_slot(),
                                                           &swiglu_slot(),
                                                           &linear_slot(),
                                                           &embedding_slot(),
                                                           &cross_entropy_slot(),
                                                           &value_head_slot(),
                                                           &router_slot(),
                                                           &grouped_gemm_slot(),
                                                           &permute_slot(),
                                                           &unpermute_slot()});
  return *table;
}

namespace {

// The slots of the decoder's body.
const std::vector<feature::SlotBase*>& body() {
  static const auto* const slots = new std::vector<feature::SlotBase*>{&attention_slot(),
                                                                       &rms_norm_slot(),
                                                                       &rope_slot(),
                                                                       &swiglu_slot(),
                                                                       &linear_slot(),
                                                                       &embedding_slot(),
                                                                       &router_slot(),
                                                                       &grouped_gemm_slot(),
                                                                       &permute_slot(),
                                                                       &unpermute_slot()};
  return *slots;
}

}  // namespace

bool is_body_changed() {
  return std::any_of(body().begin(), body().end(), [](const feature::SlotBase* slot) {
    return slot->is_changed();
  });
}

int64_t body_generation() {
  int64_t sum = 0;
  for (const feature::SlotBase* slot : body()) sum += slot->generation();
  return sum;
}

at::Tensor plain_weight(const LinearWeight& weight) {
  if (!weight.is_packed()) return weight.plain;
  return detail::embedding_forward(at::arange(weight.out, at::kInt), weight);
}

at::Tensor slot_result(const feature::SlotBase& slot,
                       const char* what,
                       const at::Tensor& got,
                       at::IntArrayRef sizes,
                       const at::Tensor& like) {
  if (got.defined() && got.sizes() == sizes && got.scalar_type() == like.scalar_type() &&
      got.device() == like.device()) {
    return got.contiguous();
  }
  const feature::SlotOwners owners = slot.applied();
  std::string who = owners.replacement;
  for (const std::string& wrapper : owners.wrappers) who += (who.empty() ? "" : ", ") + wrapper;
  BANYAN_CHECK(false,
               "[feature] ",
               slot.name(),
               " of ",
               who,
               ": wanted ",
               what,
               " ",
               sizes,
               " ",
               like.scalar_type(),
               " on ",
               like.device(),
               ", got ",
               got.defined() ? banyan::detail::concat(
                                   got.sizes(), " ", got.scalar_type(), " on ", got.device())
                             : std::string("nothing"));
  return {};
}

// --- rms_norm ---

at::Tensor rms_norm_forward(const at::Tensor& x,
                            const at::Tensor& weight,
                            double eps,
                            const ComputeOptions& options) {
  const auto op = rms_norm_slot().changed();
  if (!op) [[likely]]
    return detail::rms_norm_forward(x, weight, eps, options);
  return slot_result(rms_norm_slot(), "y", op->forward(x, weight, eps, options), x.sizes(), x);
}

at::Tensor rms_norm_backward(const at::Tensor& dy,
                             const at::Tensor& x,
                             const at::Tensor& weight,
                             double eps,
                             at::Tensor& grad_weight,
                             const ComputeOptions& options,
                             const at::Tensor& residual) {
  const auto op = rms_norm_slot().changed();
  if (!op) [[likely]] {
    return detail::rms_norm_backward(dy, x, weight, eps, grad_weight, options, residual);
  }
  return slot_result(rms_norm_slot(),
                     "dx",
                     op->backward(dy, x, weight, eps, grad_weight, options, residual),
                     x.sizes(),
                     x);
}

// --- rope ---

at::Tensor rope_forward(const at::Tensor& x,
                        const at::Tensor& positions,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        const ComputeOptions& options) {
  const auto op = rope_slot().changed();
  if (!op) [[likely]]
    return detail::rope_forward(x, positions, cos, sin, options);
  return slot_result(rope_slot(), "y", op->forward(x, positions, cos, sin, options), x.sizes(), x);
}

void rope_forward_into(const at::Tensor& x,
                       const at::Tensor& positions,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       const ComputeOptions& options,
                       at::Tensor& out) {
  if (!rope_slot().is_changed()) [[likely]] {
    return detail::rope_forward_into(x, positions, cos, sin, options, out);
  }
  out.copy_(rope_forward(x, positions, cos, sin, options));
}

at::Tensor rope_backward(const at::Tensor& dy,
                         const at::Tensor& positions,
                         const at::Tensor& cos,
                         const at::Tensor& sin,
                         const ComputeOptions& options) {
  const auto op = rope_slot().changed();
  if (!op) [[likely]]
    return detail::rope_backward(dy, positions, cos, sin, options);
  return slot_result(
      rope_slot(), "dx", op->backward(dy, positions, cos, sin, options), dy.sizes(), dy);
}

void rope_backward_into(const at::Tensor& dy,
                        const at::Tensor& positions,
                        const at::Tensor& cos,
                        const at::Tensor& sin,
                        const ComputeOptions& options,
                        at::Tensor& out) {
  if (!rope_slot().is_changed()) [[likely]] {
    return detail::rope_backward_into(dy, positions, cos, sin, options, out);
  }
  out.copy_(rope_backward(dy, positions, cos, sin, options));
}

// --- swiglu ---

at::Tensor swiglu_forward(const at::Tensor& gate_up, const ComputeOptions& options) {
  const auto op = swiglu_slot().changed();
  if (!op) [[likely]]
    return detail::swiglu_forward(gate_up, options);
  return slot_result(swiglu_slot(),
                     "y",
                     op->forward(gate_up, options),
                     {gate_up.size(0), gate_up.size(1) / 2},
                     gate_up);
}

SwigluGradients swiglu_backward(at::Tensor dy, at::Tensor gate_up, const ComputeOptions& options) {
  const auto op = swiglu_slot().changed();
  if (!op) [[likely]]
    return detail::swiglu_backward(std::move(dy), std::move(gate_up), options);
  const SwigluGradients out = op->backward(dy, gate_up, options);
  return {slot_result(swiglu_slot(), "d(gate_up)", out.gate_up, gate_up.sizes(), gate_up),
          slot_result(swiglu_slot(), "y", out.y, dy.sizes(), gate_up)};
}

// --- linear ---

at::Tensor linear_forward(const at::Tensor& x,
                          const LinearWeight& weight,
                          const at::Tensor& bias,
                          const at::Tensor& residual) {
  const auto op = linear_slot().changed();
  if (!op) [[likely]]
    return detail::linear_forward(x, weight, bias, residual);
  return slot_result(
      linear_slot(), "y", op->forward(x, weight, bias, residual), {x.size(0), weight.out}, x);
}

at::Tensor linear_backward_input(const at::Tensor& dy, const LinearWeight& weight) {
  const auto op = linear_slot().changed();
  if (!op) [[likely]]
    return detail::linear_backward_input(dy, weight);
  return slot_result(
      linear_slot(), "dx", op->backward_input(dy, weight), {dy.size(0), weight.in}, dy);
}

void linear_backward_weight(const at::Tensor& dy,
                            const at::Tensor& x,
                            at::Tensor& grad_weight,
                            const at::Tensor& grad_bias,
                            const ComputeOptions& options) {
  const auto op = linear_slot().changed();
  if (!op) [[likely]] {
    return detail::linear_backward_weight(dy, x, grad_weight, grad_bias, options);
  }
  op->backward_weight(dy, x, grad_weight, grad_bias, options);
}

// --- embedding ---

at::Tensor embedding_forward(const at::Tensor& ids, const LinearWeight& weight) {
  const auto op = embedding_slot().changed();
  if (!op) [[likely]]
    return detail::embedding_forward(ids, weight);
  return slot_result(embedding_slot(),
                     "x",
                     op->forward(ids, weight),
                     {ids.size(0), weight.in},
                     weight.is_packed() ? weight.packed : weight.plain);
}

void embedding_backward(const at::Tensor& dy, const at::Tensor& ids, at::Tensor& grad_weight) {
  const auto op = embedding_slot().changed();
  if (!op) [[likely]]
    return detail::embedding_backward(dy, ids, grad_weight);
  op->backward(dy, ids, grad_weight);
}

// --- cross_entropy ---

EdgeLogprob edge_logprob_forward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 double temperature,
                                 bool with_entropy,
                                 const ComputeOptions& options,
                                 HeadMemory* memory) {
  const auto op = cross_entropy_slot().changed();
  if (!op) [[likely]] {
    return detail::edge_logprob_forward(
        hidden, head, index, temperature, with_entropy, options, memory);
  }
  EdgeLogprob out = op->forward(hidden, head, index, temperature, with_entropy, options, memory);
  const at::Tensor like =
      at::empty({0}, hidden.options().dtype(detail::accumulate_type(hidden.scalar_type())));
  const at::IntArrayRef rows = hidden.sizes().slice(0, 1);
  out.logprob =
      slot_result(cross_entropy_slot(), "logprob", out.logprob, index.token.sizes(), like);
  out.lse = slot_result(cross_entropy_slot(), "lse", out.lse, rows, like);
  if (with_entropy) {
    out.entropy = slot_result(cross_entropy_slot(), "entropy", out.entropy, rows, like);
  }
  return out;
}

at::Tensor edge_logprob_backward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 const EdgeLogprob& forward,
                                 const at::Tensor& grad_logprob,
                                 const at::Tensor& grad_entropy,
                                 double temperature,
                                 at::Tensor& grad_head,
                                 const ComputeOptions& options,
                                 HeadMemory* memory) {
  const auto op = cross_entropy_slot().changed();
  if (!op) [[likely]] {
    return detail::edge_logprob_backward(hidden,
                                         head,
                                         index,
                                         forward,
                                         grad_logprob,
                                         grad_entropy,
                                         temperature,
                                         grad_head,
                                         options,
                                         memory);
  }
  return slot_result(cross_entropy_slot(),
                     "d(hidden)",
                     op->backward(hidden,
                                  head,
                                  index,
                                  forward,
                                  grad_logprob,
                                  grad_entropy,
                                  temperature,
                                  grad_head,
                                  options,
                                  memory),
                     hidden.sizes(),
                     hidden);
}

// --- value_head ---

at::Tensor value_head_forward(const at::Tensor& hidden, const ValueHeadWeight& head) {
  const auto op = value_head_slot().changed();
  if (!op) [[likely]]
    return detail::value_head_forward(hidden, head);
  return slot_result(value_head_slot(),
                     "values",
                     op->forward(hidden, head),
                     hidden.sizes().slice(0, 1),
                     head.weight);
}

at::Tensor value_head_backward(const at::Tensor& hidden,
                               const ValueHeadWeight& head,
                               const at::Tensor& grad_value,
                               at::Tensor& grad_weight,
                               const at::Tensor& grad_bias) {
  const auto op = value_head_slot().changed();
  if (!op) [[likely]] {
    return detail::value_head_backward(hidden, head, grad_value, grad_weight, grad_bias);
  }
  return slot_result(value_head_slot(),
                     "d(hidden)",
                     op->backward(hidden, head, grad_value, grad_weight, grad_bias),
                     hidden.sizes(),
                     hidden);
}

}  // namespace banyan::ops
