#include "banyan/ops/carry.h"

#include <ATen/ops/zeros.h>

#include "banyan/core/error.h"
#include "banyan/ops/detail/dtype.h"

namespace banyan::ops {
namespace {

bool defined_at(const std::vector<at::Tensor>& tensors, int64_t layer) {
  return layer < static_cast<int64_t>(tensors.size()) && tensors[layer].defined();
}

}  // namespace

bool CarryStore::has(int64_t layer) const { return defined_at(k, layer); }

bool CarryStore::has_gradient(int64_t layer) const { return defined_at(dk, layer); }

void CarryStore::ensure_gradient(int64_t layer) {
  if (has_gradient(layer)) return;
  BANYAN_ASSERT(has(layer), "layer ", layer, " has offered nothing");
  dk.resize(k.size());
  dv.resize(v.size());
  const auto wide = k[layer].options().dtype(detail::accumulate_type(k[layer].scalar_type()));
  dk[layer] = at::zeros(k[layer].sizes(), wide);
  dv[layer] = at::zeros(v[layer].sizes(), wide);
}

int64_t CarryStore::bytes() const {
  int64_t bytes = 0;
  for (const auto* tensors : {&k, &v, &dk, &dv}) {
    for (const at::Tensor& x : *tensors) {
      if (x.defined()) bytes += static_cast<int64_t>(x.nbytes());
    }
  }
  return bytes;
}

void check_carry(const trie::Trie& trie, const BlockCarry& carry) {
  const int64_t num_carried = carry.num_carried;
  BANYAN_CHECK(num_carried >= 0 && num_carried <= trie.num_tokens(),
               "[carry] carried tokens: wanted 0 .. ",
               trie.num_tokens(),
               ", got ",
               num_carried);
  for (int64_t t = 0; t < num_carried; ++t) {
    BANYAN_CHECK(trie.par[t] == t - 1,
                 "[carry] carried token ",
                 t,
                 ": wanted a path, so the parent ",
                 t - 1,
                 ", got ",
                 trie.par[t]);
  }
  int64_t total = 0;
  for (const CarrySource& source : carry.sources) {
    BANYAN_CHECK(source.store != nullptr && source.count > 0,
                 "[carry] source: wanted a store and a count >= 1, got ",
                 source.count);
    total += source.count;
  }
  BANYAN_CHECK(total == num_carried,
               "[carry] sources: wanted counts that sum to ",
               num_carried,
               " carried tokens, got ",
               total);
  BANYAN_CHECK(carry.offered.empty() || carry.out != nullptr,
               "[carry] offered: wanted a store for ",
               carry.offered.size(),
               " tokens");
  int64_t last = num_carried - 1;
  for (const int32_t token : carry.offered) {
    BANYAN_CHECK(token > last && token < trie.num_tokens(),
                 "[carry] offered: wanted own tokens in ascending order, got ",
                 token,
                 " after ",
                 last);
    last = token;
  }
}

}  // namespace banyan::ops
