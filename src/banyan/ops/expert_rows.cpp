// Checks and dispatch of permute and unpermute, and their forms in plain LibTorch operators.
#include "banyan/ops/expert_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/expert_rows.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/originals.h"

namespace banyan::ops {

using detail::accumulate_type;
using detail::bf16_bits;

ExpertRows sort_by_expert(const at::Tensor& choice, int64_t num_experts) {
  const at::Tensor chosen = choice.to(at::kCPU, at::kLong).contiguous();
  const int64_t* expert = chosen.const_data_ptr<int64_t>();
  const int64_t num_rows = chosen.numel();
  const int64_t num_choices = chosen.size(1);
  ExpertRows rows;
  rows.offsets.assign(num_experts + 1, 0);
  for (int64_t i = 0; i < num_rows; ++i) {
    BANYAN_CHECK(expert[i] >= 0 && expert[i] < num_experts,
                 "[experts] choice: wanted experts in [0, ",
                 num_experts,
                 "), got ",
                 expert[i]);
    ++rows.offsets[expert[i] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) rows.offsets[e + 1] += rows.offsets[e];
  rows.source = at::empty({num_rows}, at::kLong);
  rows.token = at::empty({num_rows}, at::kLong);
  rows.slot = at::empty(chosen.sizes(), at::kLong);
  auto* source = rows.source.data_ptr<int64_t>();
  auto* token = rows.token.data_ptr<int64_t>();
  auto* slot = rows.slot.data_ptr<int64_t>();
  std::vector<int64_t> next(rows.offsets.begin(), rows.offsets.end() - 1);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = next[expert[i]]++;
    source[row] = i;
    token[row] = i / num_choices;
    slot[i] = row;
  }
  for (at::Tensor* index : {&rows.source, &rows.token, &rows.slot}) {
    *index = index->to(choice.device());
  }
  return rows;
}

namespace detail {

at::Tensor permute(const at::Tensor& x, const ExpertRows& rows) {
  const profile::Scope timed("permute", [&] {
    return profile::Work{.bytes = 2 * rows.token.numel() * x.size(1) * x.element_size()};
  });
  return at::index_select(x, 0, rows.token);
}

at::Tensor unpermute(const at::Tensor& y,
                     const ExpertRows& rows,
                     const at::Tensor& weight,
                     const at::Tensor& residual,
                     const ComputeOptions& options) {
  const profile::Scope timed("unpermute",
                             [&] { return profile::Work{.bytes = 2 * int64_t(y.nbytes())}; });
  BANYAN_CHECK(y.dim() == 2 && y.size(0) == rows.token.numel(),
               "[experts] y: wanted [",
               rows.token.numel(),
               ", E], got ",
               y.sizes());
  const int64_t tokens = rows.slot.size(0);
  const int64_t choices = rows.slot.size(1);
  const at::ScalarType wide = accumulate_type(y.scalar_type());
  const at::Tensor rounded =
      weight.defined() ? weight.to(y.scalar_type()).to(wide).contiguous() : at::Tensor();
  if (is_native(options)) {
    const at::Tensor in = y.contiguous();
    const at::Tensor past = residual.defined() ? residual.contiguous() : at::Tensor();
    at::Tensor out = at::empty({tokens, y.size(1)}, y.options());
    kernels::combine_rows(tokens,
                          choices,
                          y.size(1),
                          bf16_bits(in),
                          rows.slot.const_data_ptr<int64_t>(),
                          rounded.defined() ? rounded.const_data_ptr<float>() : nullptr,
                          past.defined() ? bf16_bits(past) : nullptr,
                          bf16_bits(out));
    return out;
  }
  at::Tensor sum;
  for (int64_t c = 0; c < choices; ++c) {
    at::Tensor part = at::index_select(y, 0, rows.slot.select(1, c)).to(wide);
    if (rounded.defined()) part = part.mul(rounded.narrow(1, c, 1));
    sum = c == 0 ? part : sum.add(part);
  }
  sum = sum.to(y.scalar_type());
  return residual.defined() ? sum.add(residual) : sum;
}

}  // namespace detail

at::Tensor weight_of_rows(const at::Tensor& weight, const ExpertRows& rows, at::ScalarType dtype) {
  return at::index_select(weight.flatten(), 0, rows.source).to(dtype).to(accumulate_type(dtype));
}

at::Tensor scale_rows(const at::Tensor& x,
                      const at::Tensor& weight,
                      const ComputeOptions& options) {
  if (!is_native(options)) return x.to(weight.scalar_type()).mul(weight.unsqueeze(1)).to(x.dtype());
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty_like(in);
  kernels::scale_and_dot_rows(in.size(0),
                              in.size(1),
                              weight.const_data_ptr<float>(),
                              bf16_bits(in),
                              nullptr,
                              bf16_bits(out),
                              nullptr);
  return out;
}

at::Tensor dot_rows(const at::Tensor& a, const at::Tensor& b, const ComputeOptions& options) {
  const at::ScalarType wide = accumulate_type(a.scalar_type());
  if (!is_native(options)) return a.to(wide).mul(b.to(wide)).sum({1});
  at::Tensor dot = at::empty({a.size(0)}, a.options().dtype(wide));
  const at::Tensor left = a.contiguous();
  const at::Tensor right = b.contiguous();
  kernels::scale_and_dot_rows(a.size(0),
                              a.size(1),
                              nullptr,
                              bf16_bits(left),
                              bf16_bits(right),
                              nullptr,
                              dot.data_ptr<float>());
  return dot;
}

at::Tensor to_choices(const at::Tensor& numbers, const ExpertRows& rows) {
  return at::index_select(numbers, 0, rows.slot.flatten()).view(rows.slot.sizes());
}

}  // namespace banyan::ops
