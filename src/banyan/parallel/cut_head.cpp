#include "banyan/parallel/cut_head.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>

#include <optional>
#include <vector>

namespace banyan::parallel {
namespace {

// [X] the row of each edge.
at::Tensor row_of_edges(const ops::EdgeIndex& index) {
  const int64_t rows = index.row_offsets.numel() - 1;
  const at::Tensor counts =
      index.row_offsets.slice(0, 1).sub(index.row_offsets.slice(0, 0, rows)).to(at::kLong);
  return at::repeat_interleave(counts, std::optional<int64_t>(index.token.numel()));
}

}  // namespace

ops::EdgeIndex own_edges(const TensorParallel& tensor, const ops::EdgeIndex& index) {
  const TensorParallel::OwnTokens own = tensor.own_tokens(index.token);
  return {index.row_offsets, own.ids.sub(own.is_here.logical_not().to(at::kInt)), true};
}

at::Tensor whole_logits(const TensorParallel& tensor, const at::Tensor& own) {
  const int64_t size = tensor.ranks().size();
  const int64_t vocab = tensor.whole_vocab();
  const int64_t longest = even_part(vocab, size, 0).count;  // later runs are shorter by one at most
  at::Tensor part = own.to(at::kFloat);
  if (part.size(1) < longest) part = at::constant_pad_nd(part, {0, longest - part.size(1)});
  const at::Tensor all = tensor.ranks().all_gather(part.contiguous());  // [n, R, longest]
  at::Tensor whole = at::empty({own.size(0), vocab}, part.options());
  for (int64_t r = 0; r < size; ++r) {
    const Part run = even_part(vocab, size, r);
    whole.narrow(1, run.begin, run.count).copy_(all[r].narrow(1, 0, run.count));
  }
  return whole;
}

ops::EdgeLogprob edge_logprob_forward(const TensorParallel& tensor,
                                      const at::Tensor& hidden,
                                      const ops::LinearWeight& head,
                                      const ops::EdgeIndex& own,
                                      double temperature,
                                      bool with_entropy,
                                      const ComputeOptions& options,
                                      ops::HeadMemory* memory) {
  const ops::EdgeLogprob part =
      ops::edge_logprob_forward(hidden, head, own, temperature, with_entropy, options, memory);
  const int64_t rows = part.lse.numel();
  const int64_t edges = own.token.numel();
  const at::Tensor row = row_of_edges(own);
  // Logits of own tokens, zeros elsewhere: in fp64, so that putting lse back loses nothing more.
  const at::Tensor logit = part.logprob.to(at::kDouble)
                               .add(part.lse.to(at::kDouble).index_select(0, row))
                               .mul(own.token.ge(0));
  std::vector<at::Tensor> told = {part.lse, logit.to(part.lse.scalar_type())};
  if (with_entropy) told.push_back(part.entropy);
  const at::Tensor all = tensor.ranks().all_gather(at::cat(told)).to(at::kDouble);  // [n, ...]
  const at::Tensor lse_of = all.narrow(1, 0, rows);
  const at::Tensor lse = at::logsumexp(lse_of, {0});
  ops::EdgeLogprob whole;
  whole.kept = part.kept;
  whole.lse = lse.to(part.lse.scalar_type());
  whole.logprob =
      all.narrow(1, rows, edges).sum(0).sub(lse.index_select(0, row)).to(part.lse.scalar_type());
  if (with_entropy) {
    const at::Tensor mean_of = lse_of.sub(all.narrow(1, rows + edges, rows));
    const at::Tensor mean = lse_of.sub(lse).exp().mul(mean_of).sum(0);
    whole.entropy = lse.sub(mean).to(part.lse.scalar_type());
  }
  return whole;
}

at::Tensor edge_logprob_backward(const TensorParallel& tensor,
                                 const at::Tensor& hidden,
                                 const ops::LinearWeight& head,
                                 const ops::EdgeIndex& own,
                                 const ops::EdgeLogprob& forward,
                                 const at::Tensor& grad_logprob,
                                 const at::Tensor& grad_entropy,
                                 double temperature,
                                 at::Tensor& grad_head,
                                 const ComputeOptions& options,
                                 ops::HeadMemory* memory) {
  at::Tensor term = ops::edge_logprob_backward(hidden,
                                               head,
                                               own,
                                               forward,
                                               grad_logprob,
                                               grad_entropy,
                                               temperature,
                                               grad_head,
                                               options,
                                               memory);
  tensor.ranks().all_reduce_sum(term);
  return term;
}

at::Tensor sum_squared_probabilities(const TensorParallel& tensor,
                                     const at::Tensor& hidden,
                                     const ops::LinearWeight& head,
                                     const at::Tensor& lse,
                                     double temperature,
                                     const ComputeOptions& options) {
  at::Tensor sum = ops::sum_squared_probabilities(hidden, head, lse, temperature, options);
  tensor.ranks().all_reduce_sum(sum);
  return sum;
}

}  // namespace banyan::parallel
