#include "banyan/parallel/weight_view.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::parallel {

WeightView::WeightView(const ParamTable& params, Groups& groups)
    : params_(params), groups_(groups), places_(params.params().size()) {
  if (groups.tensor.is_alone()) return;
  const auto num_params = static_cast<int64_t>(places_.size());
  at::Tensor own = at::zeros({num_params, 2}, at::kLong);
  for (int64_t i = 0; i < num_params; ++i) {
    const Param& param = params.params()[i];
    if (param.cut.is_whole()) continue;
    own[i][0].fill_(param.cut.begin);
    own[i][1].fill_(param.master.size(param.cut.dim));
  }
  const at::Tensor all = groups.tensor.all_gather(own);  // [n, params, 2]
  const int64_t* value = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_params; ++i) {
    if (params.params()[i].cut.is_whole()) continue;
    Places& places = places_[i];
    for (int64_t r = 0; r < groups.tensor.size(); ++r) {
      places.begin.push_back(value[(r * num_params + i) * 2]);
      places.count.push_back(value[(r * num_params + i) * 2 + 1]);
      places.longest = std::max(places.longest, places.count.back());
    }
  }
}

// The cut dimension comes first on the way, padded to the longest run: ranks may hold unequal ones.
at::Tensor WeightView::gathered(size_t i, const at::Tensor& own) const {
  const Cut& cut = params_.params()[i].cut;
  if (cut.is_whole() || groups_.tensor.is_alone()) return own;
  const Places& places = places_[i];
  at::Tensor piece = own.transpose(0, cut.dim);
  std::vector<int64_t> shape = piece.sizes().vec();
  const int64_t count = shape[0];
  if (count < places.longest) {
    shape[0] = places.longest;
    at::Tensor longer = at::zeros(shape, own.options());
    longer.narrow(0, 0, count).copy_(piece);
    piece = longer;
  }
  const at::Tensor pieces = groups_.tensor.all_gather(piece);
  at::Tensor whole = at::empty(cut.whole_shape(own.sizes()), own.options());
  for (int64_t r = 0; r < groups_.tensor.size(); ++r) {
    whole.narrow(cut.dim, places.begin[r], places.count[r])
        .copy_(pieces[r].narrow(0, 0, places.count[r]).transpose(0, cut.dim));
  }
  return whole;
}

void WeightView::each(const Visit& visit) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    const Param& param = params_.params()[i];
    visit(param.name, gathered(i, param.master));
  }
}

void WeightView::each_of(const std::vector<at::Tensor>& own, const Visit& visit) const {
  BANYAN_ASSERT(own.size() == places_.size(), "weight view: got ", own.size(), " tensors");
  for (size_t i = 0; i < places_.size(); ++i) {
    visit(params_.params()[i].name, gathered(i, own[i]));
  }
}

}  // namespace banyan::parallel
