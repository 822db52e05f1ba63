#include "banyan/train/block_pass.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include "banyan/ops/trie_attention.h"

namespace banyan::train {
namespace {

at::Tensor int_tensor(const std::vector<int32_t>& values, at::Device device) {
  return at::from_blob(const_cast<int32_t*>(values.data()),
                       {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(at::kInt))
      .clone()
      .to(device);
}

// out[target[u]] += values[u] in ascending u, fp64 accumulators.
at::Tensor sum_into(const at::Tensor& values, const std::vector<int32_t>& target, int64_t size) {
  const at::Tensor wide = values.to(at::kCPU, at::kDouble).contiguous();
  at::Tensor sums = at::zeros({size}, wide.options());
  const double* from = wide.const_data_ptr<double>();
  double* to = sums.mutable_data_ptr<double>();
  for (size_t u = 0; u < target.size(); ++u) to[target[u]] += from[u];
  return sums.to(values.device(), values.scalar_type());
}

}  // namespace

BlockForward forward_block(models::CausalLM& model,
                           const trie::Block& block,
                           double temperature,
                           bool with_entropy,
                           bool keep) {
  const ComputeOptions& options = model.options();
  BlockForward out;
  out.attention = std::make_unique<ops::TrieAttention>(block.trie, options);
  out.num_tokens = block.trie.num_tokens();
  const at::Tensor hidden = model.forward(int_tensor(block.trie.tok, options.device),
                                          int_tensor(block.trie.pos, options.device),
                                          *out.attention,
                                          keep ? &out.saved : nullptr);
  out.rows = int_tensor(block.edges.source, options.device).to(at::kLong);
  out.row_hidden = hidden.index_select(0, out.rows);
  out.index.row_offsets = int_tensor(block.edges.row_offsets, options.device);
  out.index.token = int_tensor(block.edges.token, options.device);
  out.edges = ops::edge_logprob_forward(
      out.row_hidden, model.head(), out.index, temperature, with_entropy, options);
  if (!keep) out.row_hidden = at::Tensor();
  return out;
}

BlockTokens block_tokens(const trie::Plan& plan, const trie::Block& block) {
  BlockTokens tokens;
  tokens.offsets.assign(1, 0);
  const trie::LogicalTokens& logical = plan.logical;
  for (const int32_t s : block.samples) {
    for (int32_t u = logical.offsets[s]; u < logical.offsets[s + 1]; ++u) {
      tokens.edge.push_back(logical.edge[u]);
      tokens.row.push_back(logical.row[u]);
    }
    tokens.offsets.push_back(static_cast<int64_t>(tokens.edge.size()));
  }
  return tokens;
}

at::Tensor logical_log_prob(const BlockForward& forward, const BlockTokens& tokens) {
  const at::Tensor edge = int_tensor(tokens.edge, forward.edges.logprob.device()).to(at::kLong);
  return forward.edges.logprob.index_select(0, edge);
}

at::Tensor logical_entropy(const BlockForward& forward, const BlockTokens& tokens) {
  const at::Tensor row = int_tensor(tokens.row, forward.edges.entropy.device()).to(at::kLong);
  return forward.edges.entropy.index_select(0, row);
}

void backward_block(models::CausalLM& model,
                    const trie::Block& block,
                    const BlockTokens& tokens,
                    BlockForward forward,
                    const at::Tensor& grad_log_prob,
                    const at::Tensor& grad_entropy,
                    double temperature) {
  const trie::Edges& edges = block.edges;
  const at::Tensor grad_edge = sum_into(grad_log_prob, tokens.edge, edges.token.size());
  at::Tensor grad_row_entropy;
  if (grad_entropy.defined()) {
    grad_row_entropy = sum_into(grad_entropy, tokens.row, edges.source.size());
  }
  const at::Tensor grad_rows = ops::edge_logprob_backward(forward.row_hidden,
                                                          model.head(),
                                                          forward.index,
                                                          forward.edges,
                                                          grad_edge,
                                                          grad_row_entropy,
                                                          temperature,
                                                          model.head_grad(),
                                                          model.options());
  // Head rows are distinct tokens, so a copy is the whole scatter.
  at::Tensor grad_hidden = at::zeros({forward.num_tokens, grad_rows.size(1)}, grad_rows.options());
  grad_hidden.index_copy_(0, forward.rows, grad_rows);
  forward.row_hidden = at::Tensor();
  model.backward(std::move(forward.saved), grad_hidden, *forward.attention);
}

SampleScores score_samples(models::CausalLM& model,
                           const trie::Plan& plan,
                           double temperature,
                           bool with_entropy) {
  size_t num_samples = 0;
  for (const trie::Block& block : plan.blocks) num_samples += block.samples.size();
  SampleScores out;
  out.log_prob.resize(num_samples);
  if (with_entropy) out.entropy.resize(num_samples);
  for (const trie::Block& block : plan.blocks) {
    const BlockForward forward =
        forward_block(model, block, temperature, with_entropy, /*keep=*/false);
    const BlockTokens tokens = block_tokens(plan, block);
    const at::Tensor log_prob = logical_log_prob(forward, tokens);
    const at::Tensor entropy = with_entropy ? logical_entropy(forward, tokens) : at::Tensor();
    for (size_t s = 0; s < block.samples.size(); ++s) {
      const int64_t begin = tokens.offsets[s];
      const int64_t length = tokens.offsets[s + 1] - begin;
      out.log_prob[block.samples[s]] = log_prob.narrow(0, begin, length).clone();
      if (with_entropy) out.entropy[block.samples[s]] = entropy.narrow(0, begin, length).clone();
    }
  }
  return out;
}

std::vector<at::Tensor> sample_logits(models::CausalLM& model,
                                      const std::vector<Sample>& samples,
                                      bool share) {
  const trie::Trie trie = trie::build(samples, {.share = share});
  ops::TrieAttention attention(trie, model.options());
  const at::Device device = model.options().device;
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
