#include "banyan/ops/detail/carried_rows.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

namespace banyan::ops::detail {

Rows<const uint16_t> key_rows(const BlockCarry& carry,
                              std::vector<at::Tensor> CarryStore::* carried,
                              int64_t layer,
                              const at::Tensor& own) {
  Rows<const uint16_t> rows(carry.num_carried + own.size(0));
  for (const CarrySource& source : carry.sources) {
    rows.append((source.store->*carried)[layer], source.count);
  }
  rows.append(own, own.size(0));
  return rows;
}

Rows<float> sum_rows(const BlockCarry& carry,
                     std::vector<at::Tensor> CarryStore::* sums,
                     int64_t layer,
                     int64_t num_own) {
  Rows<float> rows(carry.num_carried + num_own);
  for (const CarrySource& source : carry.sources) {
    rows.append((source.store->*sums)[layer], source.count);
  }
  rows.append_null(num_own);
  if (carry.out != nullptr && carry.out->has_gradient(layer)) {
    const at::Tensor& own = (carry.out->*sums)[layer];
    const int64_t size = own.size(1) * own.size(2);
    float* row = own.data_ptr<float>();
    for (size_t i = 0; i < carry.offered.size(); ++i) {
      rows[carry.offered[i]] = row + static_cast<int64_t>(i) * size;
    }
  }
  return rows;
}

at::Tensor with_carried(const BlockCarry& carry,
                        std::vector<at::Tensor> CarryStore::* carried,
                        int64_t layer,
                        const at::Tensor& own) {
  if (carry.sources.empty()) return own;
  std::vector<at::Tensor> parts;
  for (const CarrySource& source : carry.sources) {
    parts.push_back((source.store->*carried)[layer].narrow(0, 0, source.count));
  }
  parts.push_back(own);
  return at::cat(parts, 0);
}

at::Tensor settle(const BlockCarry& carry,
                  std::vector<at::Tensor> CarryStore::* sums,
                  int64_t layer,
                  const at::Tensor& all,
                  at::ScalarType dtype) {
  int64_t at = 0;
  for (const CarrySource& source : carry.sources) {
    (source.store->*sums)[layer].narrow(0, 0, source.count).add_(all.narrow(0, at, source.count));
    at += source.count;
  }
  at::Tensor own = all.narrow(0, at, all.size(0) - at);
  if (carry.out != nullptr && carry.out->has_gradient(layer)) {
    const at::Tensor rows = at::tensor(carry.offered, at::kLong).sub_(carry.num_carried);
    own.index_add_(0, rows.to(own.device()), (carry.out->*sums)[layer]);
  }
  return own.to(dtype);
}

void offer(const BlockCarry& carry, int64_t layer, const at::Tensor& k, const at::Tensor& v) {
  CarryStore& store = *carry.out;
  if (store.has(layer)) return;
  if (static_cast<int64_t>(store.k.size()) <= layer) {
    store.k.resize(layer + 1);
    store.v.resize(layer + 1);
  }
  const at::Tensor rows =
      at::tensor(carry.offered, at::kLong).sub_(carry.num_carried).to(k.device());
  store.k[layer] = k.index_select(0, rows);
  store.v[layer] = v.index_select(0, rows);
}

}  // namespace banyan::ops::detail
