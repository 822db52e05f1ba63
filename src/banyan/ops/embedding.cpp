// Embedding rows, read from the compute form of the weight (so a tied head needs no second copy),
// and their gradient. Each thread owns a range of columns and walks the tokens in order: no
// atomics, no sorting.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/ops/detail/originals.h"
#include "banyan/ops/linear.h"

namespace banyan::ops {

using c10::BFloat16;
using kernels::Panels;

namespace {

void check_ids(const at::Tensor& ids) {
  BANYAN_CHECK(ids.dim() == 1 && ids.scalar_type() == at::kInt,
               "[embedding] ids: wanted int32 [T], got ",
               ids.scalar_type(),
               " ",
               ids.sizes());
}

// On the CPU only: elsewhere LibTorch's own check reports the index.
void check_ids_in_range(const at::Tensor& ids, int64_t vocabulary) {
  const int32_t* values = ids.const_data_ptr<int32_t>();
  for (int64_t t = 0; t < ids.numel(); ++t) {
    BANYAN_CHECK(values[t] >= 0 && values[t] < vocabulary,
                 "[embedding] token ",
                 t,
                 ": wanted an id in [0, ",
                 vocabulary,
                 "), got ",
                 values[t]);
  }
}

template <typename From, typename To>
void add_rows(const From* dy, const int32_t* ids, int64_t tokens, int64_t columns, To* grad) {
  constexpr int64_t kColumns = 64;
  at::parallel_for(0, kernels::divide_up(columns, kColumns), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kColumns;
    const int64_t last = std::min(columns, end * kColumns);
    for (int64_t t = 0; t < tokens; ++t) {
      const From* from = dy + t * columns;
      To* to = grad + ids[t] * columns;
      for (int64_t j = first; j < last; ++j) to[j] += static_cast<To>(from[j]);
    }
  });
}

}  // namespace

namespace detail {

at::Tensor embedding_forward(const at::Tensor& ids, const LinearWeight& weight) {
  const profile::Scope timed("embedding",
                             [&] { return profile::Work{.bytes = 4 * ids.numel() * weight.in}; });
  check_ids(ids);
  if (!weight.is_packed()) {
    if (ids.device().is_cpu()) check_ids_in_range(ids.contiguous(), weight.out);
    return at::index_select(weight.plain, 0, ids);
  }
  const at::Tensor tokens = ids.contiguous();
  check_ids_in_range(tokens, weight.out);
  at::Tensor rows = at::empty({tokens.numel(), weight.in}, weight.packed.options());
  const int32_t* id = tokens.const_data_ptr<int32_t>();
  BFloat16* out = rows.data_ptr<BFloat16>();
  // A row of W lies in fewer cache lines in the transposed form.
  const bool transposed = weight.packed_t.defined();
  const Panels panels =
      transposed ? Panels{weight.packed_t.const_data_ptr<BFloat16>(), weight.out, weight.in}
                 : Panels{weight.packed.const_data_ptr<BFloat16>(), weight.in, weight.out};
  at::parallel_for(0, tokens.numel(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      BFloat16* row = out + t * weight.in;
      transposed ? kernels::unpack_row_transposed(panels, id[t], row)
                 : kernels::unpack_row(panels, id[t], row);
    }
  });
  return rows;
}

void embedding_backward(const at::Tensor& dy, const at::Tensor& ids, at::Tensor& grad_weight) {
  // Rows of dW are read and written, in fp32.
  const profile::Scope timed("embedding backward", [&] {
    return profile::Work{.bytes = static_cast<int64_t>(dy.nbytes()) + 8 * dy.numel()};
  });
  check_ids(ids);
  BANYAN_CHECK(dy.dim() == 2 && dy.size(0) == ids.numel() && grad_weight.dim() == 2 &&
                   dy.size(1) == grad_weight.size(1),
               "[embedding] dy: wanted [",
               ids.numel(),
               ", ",
               grad_weight.size(-1),
               "], got ",
               dy.sizes());
  if (!grad_weight.device().is_cpu()) {
    grad_weight.index_add_(0, ids, dy.to(grad_weight.scalar_type()));
    return;
  }
  BANYAN_CHECK(
      grad_weight.is_contiguous() &&
          grad_weight.scalar_type() == (dy.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
      "[embedding] gradient: wanted a contiguous fp32 (fp64 for fp64) buffer, got ",
      grad_weight.scalar_type());
  const at::Tensor rows = dy.contiguous();
  const at::Tensor tokens = ids.contiguous();
  check_ids_in_range(tokens, grad_weight.size(0));
  const int32_t* id = tokens.const_data_ptr<int32_t>();
  const int64_t columns = dy.size(1);
  switch (dy.scalar_type()) {
    case at::kDouble:
      return add_rows(
          rows.const_data_ptr<double>(), id, ids.numel(), columns, grad_weight.data_ptr<double>());
    case at::kFloat:
      return add_rows(
          rows.const_data_ptr<float>(), id, ids.numel(), columns, grad_weight.data_ptr<float>());
    default:
      return add_rows(rows.to(at::kBFloat16).const_data_ptr<BFloat16>(),
                      id,
                      ids.numel(),
                      columns,
                      grad_weight.data_ptr<float>());
  }
}

}  // namespace detail
}  // namespace banyan::ops
