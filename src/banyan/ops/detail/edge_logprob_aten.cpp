// Plain LibTorch twin of the head. Formulas: edge_logprob.h.
#include "banyan/ops/detail/edge_logprob_aten.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "banyan/ops/detail/dtype.h"

namespace banyan::ops::aten {

namespace {

constexpr int64_t kRowsPerChunk = 256;

// A run of rows and its edges; `place` is where an edge's logit stands in the flattened [rows, V]
// logits.
struct Chunk {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_edge = 0;
  int64_t edges = 0;
  at::Tensor row;      // [edges] int64, from 0 in the chunk
  at::Tensor place;    // [edges] int64; 0 for an edge that is not here
  at::Tensor is_here;  // [edges] 1 or 0, or undefined: all are
};

std::vector<Chunk> chunks(const EdgeIndex& index, int64_t vocabulary) {
  const at::Tensor offsets = index.row_offsets.to(at::kCPU).contiguous();
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  const int64_t rows = offsets.numel() - 1;
  const at::Tensor counts =
      (index.row_offsets.slice(0, 1) - index.row_offsets.slice(0, 0, rows)).to(at::kLong);
  std::vector<Chunk> out;
  for (int64_t first = 0; first < rows; first += kRowsPerChunk) {
    Chunk chunk;
    chunk.first_row = first;
    chunk.rows = std::min(kRowsPerChunk, rows - first);
    chunk.first_edge = offset[first];
    chunk.edges = offset[first + chunk.rows] - chunk.first_edge;
    chunk.row = at::repeat_interleave(counts.slice(0, first, first + chunk.rows),
                                      std::optional<int64_t>(chunk.edges));
    const at::Tensor token =
        index.token.slice(0, chunk.first_edge, chunk.first_edge + chunk.edges).to(at::kLong);
    chunk.place = chunk.row * vocabulary + token;
    if (index.is_part) {
      chunk.is_here = token.ge(0);
      chunk.place.mul_(chunk.is_here);
    }
    out.push_back(chunk);
  }
  return out;
}

at::Tensor rows_of(const at::Tensor& x, const Chunk& chunk) {
  return x.slice(0, chunk.first_row, chunk.first_row + chunk.rows);
}

at::Tensor edges_of(const at::Tensor& x, const Chunk& chunk) {
  return x.slice(0, chunk.first_edge, chunk.first_edge + chunk.edges);
}

}  // namespace

EdgeLogprob edge_logprob_forward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 double temperature,
                                 bool with_entropy) {
  const at::ScalarType dtype = detail::accumulate_type(hidden.scalar_type());
  const auto options = hidden.options().dtype(dtype);
  const at::Tensor weight = head.plain.to(dtype);
  EdgeLogprob out;
  out.logprob = at::empty({index.token.numel()}, options);
  out.lse = at::empty({hidden.size(0)}, options);
  if (with_entropy) out.entropy = at::empty({hidden.size(0)}, options);
  for (const Chunk& chunk : chunks(index, head.out)) {
    const at::Tensor s = at::linear(rows_of(hidden, chunk).to(dtype), weight) / temperature;
    const at::Tensor lse = at::logsumexp(s, {1});
    rows_of(out.lse, chunk).copy_(lse);
    at::Tensor chosen = s.reshape({-1}).index_select(0, chunk.place);
    if (chunk.is_here.defined()) chosen.mul_(chunk.is_here);
    edges_of(out.logprob, chunk).copy_(chosen - lse.index_select(0, chunk.row));
    if (with_entropy) {
      const at::Tensor log_p = s - lse.unsqueeze(1);
      rows_of(out.entropy, chunk).copy_((log_p.exp() * log_p).sum(1).neg());
    }
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
                                 at::Tensor& grad_head) {
  const at::ScalarType dtype = detail::accumulate_type(hidden.scalar_type());
  const at::Tensor weight = head.plain.to(dtype);
  at::Tensor grad_hidden = at::empty(hidden.sizes(), hidden.options());
  for (const Chunk& chunk : chunks(index, head.out)) {
    const at::Tensor h = rows_of(hidden, chunk).to(dtype);
    const at::Tensor log_p =
        at::linear(h, weight) / temperature - rows_of(forward.lse, chunk).unsqueeze(1);
    at::Tensor scale = at::zeros({chunk.rows, 1}, log_p.options());
    at::Tensor g;
    if (grad_logprob.defined()) {
      g = edges_of(grad_logprob, chunk);
      scale.index_add_(0, chunk.row, g.unsqueeze(1), -1);
    }
    if (grad_entropy.defined()) {
      const at::Tensor entropy = rows_of(forward.entropy, chunk).unsqueeze(1);
      scale = scale - rows_of(grad_entropy, chunk).unsqueeze(1) * (log_p + entropy);
    }
    at::Tensor dz = log_p.exp() * scale;
    if (g.defined()) {
      dz.view({-1}).index_add_(0, chunk.place, chunk.is_here.defined() ? g * chunk.is_here : g);
    }
    dz.div_(temperature);
    rows_of(grad_hidden, chunk).copy_(at::mm(dz, weight));
    grad_head.addmm_(dz.t(), h);
  }
  return grad_hidden;
}

at::Tensor head_logits(const at::Tensor& hidden, const LinearWeight& head) {
  const at::ScalarType dtype = detail::accumulate_type(hidden.scalar_type());
  return at::linear(hidden.to(dtype), head.plain.to(dtype));
}

at::Tensor logits_logprob(const at::Tensor& logits, const at::Tensor& token, double temperature) {
  const at::Tensor s = logits / temperature;
  return s.gather(1, token.to(at::kLong).unsqueeze(1)).squeeze(1) - at::logsumexp(s, {1});
}

}  // namespace banyan::ops::aten
