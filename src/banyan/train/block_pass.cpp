#include "banyan/train/block_pass.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "banyan/core/error.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/ops/value_head.h"
#include "banyan/parallel/cut_head.h"
#include "banyan/parallel/pipeline_stage.h"

namespace banyan::train {
namespace {

// values[first..] as int32 on the device.
at::Tensor int_tensor(const std::vector<int32_t>& values, at::Device device, int64_t first = 0) {
  return at::from_blob(const_cast<int32_t*>(values.data()) + first,
                       {static_cast<int64_t>(values.size()) - first},
                       at::TensorOptions().dtype(at::kInt))
      .clone()
      .to(device);
}

// Own tokens that have a head row, [R] int64, counted from the block's first own token.
at::Tensor row_index(const trie::Block& block, at::Device device) {
  return int_tensor(block.edges.source, device).to(at::kLong).sub_(block.num_carried);
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

}  // namespace

int64_t BlockBody::bytes() const {
  if (!saved) return 0;
  return saved->bytes() + bytes_of(row_hidden);
}

int64_t BlockBody::backward_bytes() const {
  if (!saved) return 0;
  return saved->backward_bytes() + bytes_of(row_hidden);
}

BlockBody forward_body(models::CausalLM& model,
                       const trie::Block& block,
                       std::unique_ptr<AttentionContext> attention,
                       bool keep,
                       int64_t chunk,
                       const at::Tensor& input) {
  const ComputeOptions& options = model.options();
  BlockBody body;
  body.attention = std::move(attention);
  const at::Tensor hidden = model.forward_chunk(
      chunk,
      input.defined() ? input : int_tensor(block.trie.tok, options.device, block.num_carried),
      int_tensor(block.trie.pos, options.device, block.num_carried),
      *body.attention,
      keep ? &body.saved : nullptr);
  if (model.stage() != nullptr && !model.stage()->is_last(chunk)) {
    body.rows = hidden;
    return body;
  }
  body.row_hidden = hidden.index_select(0, row_index(block, options.device));
  return body;
}

BlockHead forward_head(models::CausalLM& model,
                       const trie::Block& block,
                       const at::Tensor& row_hidden,
                       const HeadSpec& spec,
                       ops::HeadMemory* memory) {
  const ComputeOptions& options = model.options();
  BlockHead head;
  if (model.head_kind() == models::HeadKind::kValue) {
    head.value = ops::value_head_forward(row_hidden, model.value_head());
    return head;
  }
  head.index.row_offsets = int_tensor(block.edges.row_offsets, options.device);
  head.index.token = int_tensor(block.edges.token, options.device);
  if (const parallel::TensorParallel* tensor = model.tensor()) {
    head.index = parallel::own_edges(*tensor, head.index);
    head.edges = parallel::edge_logprob_forward(*tensor,
                                                row_hidden,
                                                model.head(),
                                                head.index,
                                                spec.temperature,
                                                spec.with_entropy,
                                                options,
                                                memory);
    if (spec.with_sum_squares) {
      head.sum_squares = parallel::sum_squared_probabilities(
          *tensor, row_hidden, model.head(), head.edges.lse, spec.temperature, options);
    }
    return head;
  }
  head.edges = ops::edge_logprob_forward(
      row_hidden, model.head(), head.index, spec.temperature, spec.with_entropy, options, memory);
  if (spec.with_sum_squares) {
    head.sum_squares = ops::sum_squared_probabilities(
        row_hidden, model.head(), head.edges.lse, spec.temperature, options);
  }
  return head;
}

namespace {

// d(hidden) of the head rows.
at::Tensor vocabulary_backward(models::CausalLM& model,
                               const at::Tensor& row_hidden,
                               const BlockHead& head,
                               const HeadGradients& gradients,
                               const HeadSpec& spec,
                               ops::HeadMemory* memory) {
  const auto to = head.edges.logprob.options();
  const at::Tensor edge = gradients.edge.to(to);
  const at::Tensor entropy = gradients.entropy.defined() ? gradients.entropy.to(to) : at::Tensor();
  const auto call = [&](const auto& backward) {
    return backward(row_hidden,
                    model.head(),
                    head.index,
                    head.edges,
                    edge,
                    entropy,
                    spec.temperature,
                    model.head_grad(),
                    model.options(),
                    memory);
  };
  if (model.tensor() == nullptr) return call(ops::edge_logprob_backward);
  return call([&](auto&&... arguments) {
    return parallel::edge_logprob_backward(*model.tensor(), arguments...);
  });
}

}  // namespace

at::Tensor backward_head(models::CausalLM& model,
                         const trie::Block& block,
                         BlockBody& body,
                         const BlockHead& head,
                         const HeadGradients& gradients,
                         const HeadSpec& spec,
                         ops::HeadMemory* memory) {
  at::Tensor grad_rows;
  if (model.head_kind() == models::HeadKind::kValue) {
    grad_rows = ops::value_head_backward(body.row_hidden,
                                         model.value_head(),
                                         gradients.row.to(head.value.options()),
                                         model.value_head_grad(),
                                         model.value_head_bias_grad());
  } else {
    grad_rows = vocabulary_backward(model, body.row_hidden, head, gradients, spec, memory);
  }
  // Head rows are distinct tokens, so a copy is the whole scatter.
  at::Tensor grad_hidden = at::zeros({block.num_own(), grad_rows.size(1)}, grad_rows.options());
  grad_hidden.index_copy_(0, row_index(block, grad_rows.device()), grad_rows);
  body.row_hidden = at::Tensor();
  return grad_hidden;
}

at::Tensor backward_body(models::CausalLM& model,
                         BlockBody body,
                         const at::Tensor& grad,
                         int64_t chunk) {
  return model.backward_chunk(chunk, std::move(body.saved), grad, *body.attention);
}

std::vector<at::Tensor> sample_logits(models::CausalLM& model,
                                      const std::vector<Sample>& samples,
                                      bool share) {
  const trie::Trie trie = trie::build(samples, {.share = share});
  ops::TrieAttention attention(trie, model.options());
  const at::Device device = model.options().device;
  BANYAN_ASSERT(model.tensor() == nullptr && model.stage() == nullptr,
                "logits of a model that is cut over ranks");
  const at::Tensor hidden = model.forward(
      int_tensor(trie.tok, device), int_tensor(trie.pos, device), attention, /*saved=*/nullptr);
  const at::Tensor logits = ops::head_logits(hidden, model.head(), model.options());
  std::vector<at::Tensor> out;
  for (size_t s = 0; s < samples.size(); ++s) {
    const at::Tensor path = int_tensor(trie.path(static_cast<int32_t>(s)), device);
    out.push_back(logits.index_select(0, path.to(at::kLong)));
  }
  return out;
}

}  // namespace banyan::train
