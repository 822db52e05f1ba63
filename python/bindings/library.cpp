// PackedTrie: the trie and its ops for callers who train in PyTorch. banyan/trie.py and
// banyan/ops.py wrap it.
#include <ATen/ops/empty.h>

#include "banyan/ops/packed_trie.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

using ops::PackedTrie;
using Ints = std::vector<std::vector<int32_t>>;

// `positions` and `scored` are empty, or one vector per sample.
std::unique_ptr<PackedTrie> pack(const Ints& ids,
                                 const Ints& positions,
                                 const std::vector<std::vector<bool>>& scored,
                                 bool share,
                                 int32_t min_prefix_len,
                                 int32_t min_group_size) {
  py::gil_scoped_release release;
  std::vector<Sample> samples(ids.size());
  for (size_t s = 0; s < ids.size(); ++s) {
    samples[s].uid = static_cast<int64_t>(s);
    samples[s].tokens = ids[s];
    if (!positions.empty()) samples[s].positions = positions.at(s);
    if (!scored.empty()) samples[s].scored.assign(scored.at(s).begin(), scored.at(s).end());
  }
  return std::make_unique<PackedTrie>(
      samples,
      trie::BuildOptions{
          .share = share, .min_prefix_len = min_prefix_len, .min_group_size = min_group_size});
}

template <typename Range>
at::Tensor ints(const Range& values, at::ScalarType dtype = at::kInt) {
  at::Tensor out = at::empty({static_cast<int64_t>(values.size())}, at::kInt);
  std::copy(values.begin(), values.end(), out.data_ptr<int32_t>());
  return out.to(dtype);
}

// [N, 6]: begin, end, tout, parent, num_samples, depth.
at::Tensor segment_table(const trie::Trie& trie) {
  std::vector<int32_t> table;
  for (const trie::Segment& s : trie.segments) {
    table.insert(table.end(), {s.begin, s.end, s.tout, s.parent, s.num_samples, s.depth});
  }
  return ints(table).view({-1, 6});
}

// Packed indices of every sample's tokens, one sample after another: [U].
at::Tensor all_paths(const trie::Trie& trie) {
  std::vector<int32_t> out;
  out.reserve(trie.num_logical);
  for (size_t s = 0; s < trie.sample_end.size(); ++s) {
    const std::vector<int32_t> path = trie.path(static_cast<int32_t>(s));
    out.insert(out.end(), path.begin(), path.end());
  }
  return ints(out, at::kLong);
}

py::dict arrays(const PackedTrie& packed) {
  const trie::Trie& trie = packed.trie();
  std::vector<int64_t> lengths;
  for (const int32_t end : trie.sample_end) lengths.push_back(trie.dep[end] + 1);
  py::dict out;
  out["tokens"] = ints(trie.tok, at::kLong);
  out["positions"] = ints(trie.pos, at::kLong);
  out["parent"] = ints(trie.par);
  out["depth"] = ints(trie.dep);
  out["tout"] = ints(trie.tout);
  out["segments"] = segment_table(trie);
  out["paths"] = all_paths(trie);
  out["lengths"] = lengths;
  out["num_pairs"] = trie.num_pairs();
  return out;
}

py::dict edge_arrays(const PackedTrie& packed) {
  const trie::Edges& edges = packed.edges();
  const trie::LogicalTokens& logical = packed.logical();
  py::dict out;
  out["source"] = ints(edges.source, at::kLong);
  out["row_offsets"] = ints(edges.row_offsets);
  out["token"] = ints(edges.token);
  std::vector<int64_t> counts;
  std::vector<int32_t> sample;
  for (size_t s = 0; s + 1 < logical.offsets.size(); ++s) {
    counts.push_back(logical.offsets[s + 1] - logical.offsets[s]);
    sample.resize(logical.offsets[s + 1], static_cast<int32_t>(s));
  }
  out["logical_edge"] = ints(logical.edge, at::kLong);
  out["logical_row"] = ints(logical.row, at::kLong);
  out["logical_sample"] = ints(sample, at::kLong);
  out["logical_position"] = ints(logical.position, at::kLong);
  out["counts"] = counts;
  return out;
}

using Tensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

}  // namespace

void bind_library(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PackedTrie>(module, "PackedTrie", "A packed trie and the ops on it.")
      .def(py::init(&pack),
           py::arg("samples"),
           py::arg("positions"),
           py::arg("scored"),
           py::arg("share"),
           py::arg("min_prefix_len"),
           py::arg("min_group_size"))
      .def("arrays", &arrays, "Integer arrays of the trie by name.")
      .def("edge_arrays", &edge_arrays, "Integer arrays of its scored edges by name.")
      .def(
          "attention_forward",
          [](PackedTrie& packed,
             const at::Tensor& q,
             const at::Tensor& k,
             const at::Tensor& v,
             double scale) {
            PackedTrie::Attention result = packed.attention_forward(q, k, v, scale);
            return std::make_tuple(result.out, result.lse);
          },
          Release(),
          "q [T, H, D], k, v [T, K, D] -> out [T, H, D], lse [T, H].")
      .def(
          "attention_backward",
          [](PackedTrie& packed,
             const at::Tensor& grad_out,
             const at::Tensor& q,
             const at::Tensor& k,
             const at::Tensor& v,
             const at::Tensor& out,
             const at::Tensor& lse,
             double scale) {
            AttentionGradients result =
                packed.attention_backward(grad_out, q, k, v, {out, lse}, scale);
            return Tensors(result.dq, result.dk, result.dv);
          },
          Release(),
          "Gradients of q, k and v.")
      .def(
          "logprob_forward",
          [](const PackedTrie& packed,
             const at::Tensor& rows,
             const at::Tensor& weight,
             double temperature,
             bool entropy) {
            ops::EdgeLogprob result = packed.logprob_forward(rows, weight, temperature, entropy);
            return Tensors(result.logprob, result.lse, result.entropy);
          },
          Release(),
          "rows [R, E], weight [V, E] -> logprob [X], lse [R], entropy [R] or None.")
      .def(
          "logprob_backward",
          [](const PackedTrie& packed,
             const at::Tensor& rows,
             const at::Tensor& weight,
             const at::Tensor& lse,
             const std::optional<at::Tensor>& entropy,
             const std::optional<at::Tensor>& grad_logprob,
             const std::optional<at::Tensor>& grad_entropy,
             double temperature) {
            ops::EdgeLogprob forward;
            forward.lse = lse;
            if (entropy) forward.entropy = *entropy;
            PackedTrie::LogprobGradients result =
                packed.logprob_backward(rows,
                                        weight,
                                        forward,
                                        grad_logprob.value_or(at::Tensor()),
                                        grad_entropy.value_or(at::Tensor()),
                                        temperature);
            return std::make_tuple(result.rows, result.weight);
          },
          Release(),
          "Gradients of rows and weight.");
}

}  // namespace banyan::bindings
