// Keys, values and their sums where a block's own tokens and carried ones (ops/carry.h) lie apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/ops/carry.h"

namespace banyan::ops::detail {

// Row [K, D] of every token of a trie, carried ones first.
template <typename T>
class Rows {
 public:
  explicit Rows(size_t num_tokens) { rows_.reserve(num_tokens); }
  // The first `count` rows of [n, K, D] with token rows.
  void append(const at::Tensor& x, int64_t count) {
    T* row = static_cast<T*>(x.data_ptr());
    for (int64_t i = 0; i < count; ++i) rows_.push_back(row + i * x.stride(0));
  }
  void append_null(int64_t count) { rows_.resize(rows_.size() + count, nullptr); }
  T*& operator[](int64_t token) { return rows_[token]; }
  T* const* data() const { return rows_.data(); }

 private:
  std::vector<T*> rows_;
};

// Rows of keys (or values): `carried` of the sources, then `own`.
Rows<const uint16_t> key_rows(const BlockCarry& carry,
                              std::vector<at::Tensor> CarryStore::* carried,
                              int64_t layer,
                              const at::Tensor& own);

// Accumulator rows: of the sources for carried tokens, of the own store for offered ones.
Rows<float> sum_rows(const BlockCarry& carry,
                     std::vector<at::Tensor> CarryStore::* sums,
                     int64_t layer,
                     int64_t num_own);

// Carried keys (or values, or sums) of a layer before `own`, in one tensor.
at::Tensor with_carried(const BlockCarry& carry,
                        std::vector<at::Tensor> CarryStore::* carried,
                        int64_t layer,
                        const at::Tensor& own);

// The gradient of the own tokens, out of that of all [T, K, D] in the accumulate type: the carried
// part goes to the accumulators of the sources, the accumulators of offered tokens are added.
at::Tensor settle(const BlockCarry& carry,
                  std::vector<at::Tensor> CarryStore::* sums,
                  int64_t layer,
                  const at::Tensor& all,
                  at::ScalarType dtype);

// Keeps the rows of the offered tokens in the store, once.
void offer(const BlockCarry& carry, int64_t layer, const at::Tensor& k, const at::Tensor& v);

}  // namespace banyan::ops::detail
