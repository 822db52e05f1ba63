#include "banyan/nn/weight.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "banyan/core/error.h"

namespace banyan::nn {
namespace {

// A Param that is rows [begin, begin + num_rows) of a fused master.
struct Rows {
  int64_t param = 0;
  int64_t begin = 0;
  int64_t num_rows = 0;
};

at::Tensor new_master(const ParamTable& table,
                      std::vector<int64_t> shape,
                      const ComputeOptions& options) {
  const at::ScalarType dtype = options.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto like = at::TensorOptions().dtype(dtype).device(options.device);
  return table.masters_are_empty() ? at::empty(shape, like) : at::zeros(shape, like);
}

// Adds one Param per part and registers the function that lends all of them one gradient buffer,
// `grad`.
template <typename Parts, typename SizeOf>
void add_params(ParamTable& table,
                const Parts& parts,
                SizeOf size_of,
                const at::Tensor& master,
                at::Tensor& grad) {
  std::vector<Rows> rows;
  int64_t begin = 0;
  for (const auto& part : parts) {
    const int64_t num_rows = size_of(part);
    rows.push_back({table.add(part.name, master.narrow(0, begin, num_rows)), begin, num_rows});
    begin += num_rows;
  }
  table.on_ensure_grads([&table, &grad, master, rows] {
    if (table.params()[rows[0].param].grad.defined()) return;
    grad = at::zeros_like(master);
    for (const Rows& part : rows) {
      table.params()[part.param].grad = grad.narrow(0, part.begin, part.num_rows);
    }
  });
}

// No page of such a master has been touched.
void drop_empty(const ParamTable& table, const at::Tensor& master) {
  if (!table.masters_are_empty()) return;
  c10::StorageImpl* storage = master.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
  storage->set_nbytes(0);
}

void mark_forms(ParamTable& table, size_t first, bool is_form) {
  for (size_t i = first; i < table.params().size(); ++i) table.params()[i].is_form = is_form;
}

}  // namespace

Weight::Weight(ParamTable& table,
               std::vector<Part> parts,
               int64_t in,
               const ComputeOptions& options,
               bool with_backward) {
  int64_t out = 0;
  for (const Part& part : parts) out += part.out;
  master_ = new_master(table, {out, in}, options);
  compute_.out = out;
  compute_.in = in;
  const size_t first = table.params().size();
  add_params(table, parts, [](const Part& part) { return part.out; }, master_, grad_);
  mark_forms(table, first, !is_native(options) && master_.scalar_type() == options.dtype);
  drop_empty(table, master_);
  table.on_repack(
      [this, options, with_backward] {
        ops::pack_weight(master_, options, with_backward, compute_);
      },
      [this](const std::function<void(at::Tensor&)>& visit) {
        for (at::Tensor* form : {&compute_.plain, &compute_.packed, &compute_.packed_t}) {
          if (form->defined()) visit(*form);
        }
      });
}

kernels::Panels Weight::panels() const {
  BANYAN_ASSERT(compute_.is_packed(), "weight: there is no packed form");
  return {compute_.packed.const_data_ptr<c10::BFloat16>(), compute_.in, compute_.out};
}

const uint16_t* Vector::bits() const {
  return reinterpret_cast<const uint16_t*>(compute_.const_data_ptr<c10::BFloat16>());
}

Vector::Vector(ParamTable& table, std::vector<Part> parts, const ComputeOptions& options) {
  int64_t size = 0;
  for (const Part& part : parts) size += part.size;
  master_ = new_master(table, {size}, options);
  const size_t first = table.params().size();
  add_params(table, parts, [](const Part& part) { return part.size; }, master_, grad_);
  mark_forms(table, first, master_.scalar_type() == options.dtype);
  drop_empty(table, master_);
  if (master_.scalar_type() == options.dtype) {
    compute_ = master_;
    return;
  }
  compute_ = at::empty(master_.sizes(), master_.options().dtype(options.dtype));
  table.on_repack([this] { compute_.copy_(master_); });
}

}  // namespace banyan::nn
