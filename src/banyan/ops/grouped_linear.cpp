// Grouped products as one product per expert that has rows, written where its rows stand.
#include "banyan/ops/grouped_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/ops/detail/originals.h"

namespace banyan::ops {
namespace {

using c10::BFloat16;

void check_rows(const char* what,
                const at::Tensor& x,
                const std::vector<int64_t>& offsets,
                const ExpertWeights& weights,
                int64_t columns) {
  BANYAN_CHECK(!weights.empty() && offsets.size() == weights.size() + 1,
               "[grouped_linear] offsets: wanted one more than the ",
               weights.size(),
               " weights, got ",
               offsets.size());
  BANYAN_CHECK(x.dim() == 2 && x.size(0) == offsets.back() && x.size(1) == columns,
               "[grouped_linear] ",
               what,
               ": wanted shape [",
               offsets.back(),
               ", ",
               columns,
               "], got ",
               x.sizes());
}

profile::Work work_of(int64_t rows, const ExpertWeights& weights) {
  const int64_t in = weights[0]->in;
  const int64_t out = weights[0]->out;
  const int64_t numbers = rows * (in + out) + static_cast<int64_t>(weights.size()) * in * out;
  return {.flops = 2 * rows * in * out, .bytes = 2 * numbers, .rows = out, .columns = in};
}

// y = x Bᵉ for each expert e; `panels_of` gives Bᵉ of a packed weight, `plain_of` of a plain one.
template <typename PanelsOf, typename PlainOf>
at::Tensor multiply(const at::Tensor& x,
                    const std::vector<int64_t>& offsets,
                    const ExpertWeights& weights,
                    int64_t columns,
                    const PanelsOf& panels_of,
                    const PlainOf& plain_of) {
  const at::Tensor rows = x.contiguous();
  at::Tensor y = at::empty({x.size(0), columns}, x.options());
  for (size_t e = 0; e < weights.size(); ++e) {
    const int64_t first = offsets[e];
    const int64_t count = offsets[e + 1] - first;
    if (count == 0) continue;
    if (weights[e]->is_packed()) {
      kernels::gemm(rows.const_data_ptr<BFloat16>() + first * rows.size(1),
                    rows.size(1),
                    count,
                    panels_of(*weights[e]),
                    /*bias=*/nullptr,
                    y.data_ptr<BFloat16>() + first * columns,
                    columns);
    } else {
      at::Tensor out = y.narrow(0, first, count);
      at::mm_out(out, rows.narrow(0, first, count), plain_of(*weights[e]));
    }
  }
  return y;
}

}  // namespace

namespace detail {

at::Tensor grouped_linear_forward(const at::Tensor& x,
                                  const std::vector<int64_t>& offsets,
                                  const ExpertWeights& weights) {
  const profile::Scope timed("grouped linear", [&] { return work_of(x.size(0), weights); });
  check_rows("x", x, offsets, weights, weights[0]->in);
  return multiply(
      x,
      offsets,
      weights,
      weights[0]->out,
      [](const LinearWeight& w) {
        return kernels::Panels{w.packed.const_data_ptr<BFloat16>(), w.in, w.out};
      },
      [](const LinearWeight& w) { return w.plain.t(); });
}

at::Tensor grouped_linear_backward_input(const at::Tensor& dy,
                                         const std::vector<int64_t>& offsets,
                                         const ExpertWeights& weights) {
  const profile::Scope timed("grouped linear dx", [&] { return work_of(dy.size(0), weights); });
  check_rows("dy", dy, offsets, weights, weights[0]->out);
  return multiply(
      dy,
      offsets,
      weights,
      weights[0]->in,
      [](const LinearWeight& w) {
        BANYAN_ASSERT(w.packed_t.defined(), "the weight was packed for inference only");
        return kernels::Panels{w.packed_t.const_data_ptr<BFloat16>(), w.out, w.in};
      },
      [](const LinearWeight& w) { return w.plain; });
}

void grouped_linear_backward_weight(const at::Tensor& dy,
                                    const at::Tensor& x,
                                    const std::vector<int64_t>& offsets,
                                    const std::vector<at::Tensor*>& grads,
                                    const ComputeOptions& options) {
  BANYAN_CHECK(offsets.size() == grads.size() + 1 && x.size(0) == offsets.back(),
               "[grouped_linear] x: wanted ",
               grads.size(),
               " groups of rows and ",
               offsets.back(),
               " rows, got ",
               x.sizes());
  for (size_t e = 0; e < grads.size(); ++e) {
    const int64_t count = offsets[e + 1] - offsets[e];
    if (count == 0) continue;
    linear_backward_weight(dy.narrow(0, offsets[e], count),
                           x.narrow(0, offsets[e], count),
                           *grads[e],
                           /*grad_bias=*/at::Tensor(),
                           options);
  }
}

}  // namespace detail

}  // namespace banyan::ops
