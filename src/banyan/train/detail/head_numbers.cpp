#include "banyan/train/detail/head_numbers.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::train::detail {
namespace {

at::Tensor to_double(const at::Tensor& x) {
  return x.defined() ? x.to(at::kCPU, at::kDouble).contiguous() : at::Tensor();
}

}  // namespace

HeadNumbers::HeadNumbers(const trie::Plan& plan,
                         const HeadSpec& spec,
                         models::HeadKind head,
                         at::ScalarType type)
    : plan_(plan),
      is_value_head_(head == models::HeadKind::kValue),
      type_(type),
      kinds_{Kind::kValue},
      blocks_(plan.blocks.size()) {
  if (is_value_head_) return;
  if (spec.with_entropy) kinds_.push_back(Kind::kEntropy);
  if (spec.with_sum_squares) kinds_.push_back(Kind::kSumSquares);
}

bool HeadNumbers::has(Kind kind) const {
  return std::find(kinds_.begin(), kinds_.end(), kind) != kinds_.end();
}

void HeadNumbers::put(int32_t block, const BlockHead& head) {
  put(block, Kind::kValue, to_double(is_value_head_ ? head.value : head.edges.logprob));
  put(block, Kind::kEntropy, to_double(head.edges.entropy));
  put(block, Kind::kSumSquares, to_double(head.sum_squares));
  set_there(block);
}

void HeadNumbers::put(int32_t block, Kind kind, const at::Tensor& numbers) {
  blocks_[block].numbers[static_cast<size_t>(kind)] = numbers;
}

const at::Tensor& HeadNumbers::of(int32_t block, Kind kind) const {
  return blocks_[block].numbers[static_cast<size_t>(kind)];
}

int64_t HeadNumbers::count(size_t block, Kind kind) const {
  const trie::Edges& edges = plan_.blocks[block].edges;
  return static_cast<int64_t>(on_edges(kind) ? edges.token.size() : edges.source.size());
}

at::Tensor HeadNumbers::packed() const {
  int64_t total = 0;
  for (const Kind kind : kinds_) {
    for (size_t b = 0; b < blocks_.size(); ++b) total += count(b, kind);
  }
  at::Tensor all = at::empty({total}, at::kDouble);
  int64_t begin = 0;
  for (const Kind kind : kinds_) {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const int64_t size = count(b, kind);
      if (blocks_[b].is_there) all.narrow(0, begin, size).copy_(of(static_cast<int32_t>(b), kind));
      begin += size;
    }
  }
  return all;
}

void HeadNumbers::unpack(const at::Tensor& numbers) {
  int64_t begin = 0;
  for (const Kind kind : kinds_) {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const int64_t size = count(b, kind);
      put(static_cast<int32_t>(b), kind, numbers.narrow(0, begin, size));
      begin += size;
    }
  }
  for (Block& block : blocks_) block.is_there = true;
}

at::Tensor HeadNumbers::gather(const std::vector<int32_t>& samples, Kind kind) const {
  const trie::LogicalTokens& logical = plan_.logical;
  const std::vector<int32_t>& place = on_edges(kind) ? logical.edge : logical.row;
  int64_t total = 0;
  for (const int32_t s : samples) total += logical.offsets[s + 1] - logical.offsets[s];
  at::Tensor out = at::empty({total}, at::kDouble);
  double* to = out.data_ptr<double>();
  for (const int32_t s : samples) {
    for (int32_t u = logical.offsets[s]; u < logical.offsets[s + 1]; ++u) {
      const int32_t block = logical.block[u];
      BANYAN_ASSERT(is_there(block), "the loss of sample ", s, " comes before its forward");
      *to++ = of(block, kind).const_data_ptr<double>()[place[u]];
    }
  }
  return out.to(type_);
}

}  // namespace banyan::train::detail
