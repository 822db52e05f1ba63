// The ops as banyan has them, without their slots (ops/slots.h): the same names and contracts.
#pragma once

#include "banyan/ops/edge_logprob.h"
#include "banyan/ops/expert_rows.h"
#include "banyan/ops/grouped_linear.h"
#include "banyan/ops/linear.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/rope.h"
#include "banyan/ops/router.h"
#include "banyan/ops/swiglu.h"
#include "banyan/ops/value_head.h"

namespace banyan::ops::detail {

decltype(ops::rms_norm_forward) rms_norm_forward;
decltype(ops::rms_norm_backward) rms_norm_backward;
decltype(ops::rope_forward) rope_forward;
decltype(ops::rope_forward_into) rope_forward_into;
decltype(ops::rope_backward) rope_backward;
decltype(ops::rope_backward_into) rope_backward_into;
decltype(ops::swiglu_forward) swiglu_forward;
decltype(ops::swiglu_backward) swiglu_backward;
decltype(ops::linear_forward) linear_forward;
decltype(ops::linear_backward_input) linear_backward_input;
decltype(ops::linear_backward_weight) linear_backward_weight;
decltype(ops::embedding_forward) embedding_forward;
decltype(ops::embedding_backward) embedding_backward;
decltype(ops::edge_logprob_forward) edge_logprob_forward;
decltype(ops::edge_logprob_backward) edge_logprob_backward;
decltype(ops::value_head_forward) value_head_forward;
decltype(ops::value_head_backward) value_head_backward;
decltype(ops::route) route;
decltype(ops::grouped_linear_forward) grouped_linear_forward;
decltype(ops::grouped_linear_backward_input) grouped_linear_backward_input;
decltype(ops::grouped_linear_backward_weight) grouped_linear_backward_weight;
decltype(ops::permute) permute;
decltype(ops::unpermute) unpermute;

}  // namespace banyan::ops::detail
