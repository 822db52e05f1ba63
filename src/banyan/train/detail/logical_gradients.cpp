#include "banyan/train/detail/logical_gradients.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace banyan::train::detail {
namespace {

// On its way to an edge or a row; a NaN stands last.
struct Contribution {
  int32_t target = 0;
  double value = 0.0;
  bool operator<(const Contribution& other) const {
    if (target != other.target) return target < other.target;
    if (std::isnan(value) || std::isnan(other.value)) return !std::isnan(value);
    return value < other.value;
  }
};

}  // namespace

LogicalGradients::LogicalGradients(const trie::Plan& plan)
    : plan_(plan),
      offsets_(plan.blocks.size() + 1, 0),
      tokens_(plan.logical.block.size()),
      pending_(plan.blocks.size()),
      value_(at::zeros({static_cast<int64_t>(plan.logical.block.size())}, at::kDouble)) {
  for (const int32_t block : plan.logical.block) ++offsets_[block + 1];
  for (size_t b = 0; b < pending_.size(); ++b) pending_[b] = offsets_[b + 1];
  std::partial_sum(offsets_.begin(), offsets_.end(), offsets_.begin());
  std::vector<int64_t> next(offsets_.begin(), offsets_.end() - 1);
  for (size_t u = 0; u < plan.logical.block.size(); ++u) {
    tokens_[next[plan.logical.block[u]]++] = static_cast<int64_t>(u);
  }
}

void LogicalGradients::take(const std::vector<int32_t>& samples, const TokenGradients& gradients) {
  if (gradients.entropy.defined() && !entropy_.defined()) entropy_ = at::zeros_like(value_);
  int64_t begin = 0;
  for (const int32_t s : samples) {
    const int64_t first = plan_.logical.offsets[s];
    const int64_t length = plan_.logical.offsets[s + 1] - first;
    value_.narrow(0, first, length).copy_(gradients.value.narrow(0, begin, length));
    if (gradients.entropy.defined()) {
      entropy_.narrow(0, first, length).copy_(gradients.entropy.narrow(0, begin, length));
    }
    for (int64_t u = first; u < first + length; ++u) --pending_[plan_.logical.block[u]];
    begin += length;
  }
}

at::Tensor LogicalGradients::of_entropies(int32_t block) const {
  return entropy_.defined() ? sum(block, entropy_, /*on_edges=*/false) : at::Tensor();
}

at::Tensor LogicalGradients::sum(int32_t block, const at::Tensor& gradient, bool on_edges) const {
  const trie::Edges& edges = plan_.blocks[block].edges;
  const std::vector<int32_t>& target = on_edges ? plan_.logical.edge : plan_.logical.row;
  const double* from = gradient.const_data_ptr<double>();
  std::vector<Contribution> parts;
  parts.reserve(offsets_[block + 1] - offsets_[block]);
  for (int64_t i = offsets_[block]; i < offsets_[block + 1]; ++i) {
    parts.push_back({target[tokens_[i]], from[tokens_[i]]});
  }
  std::sort(parts.begin(), parts.end());
  at::Tensor out = at::zeros(
      {static_cast<int64_t>(on_edges ? edges.token.size() : edges.source.size())}, at::kDouble);
  double* to = out.data_ptr<double>();
  for (const Contribution& part : parts) to[part.target] += part.value;
  return out;
}

}  // namespace banyan::train::detail
