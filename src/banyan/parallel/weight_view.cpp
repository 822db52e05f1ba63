#include "banyan/parallel/weight_view.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::parallel {

WeightView::WeightView(const ParamTable& params, Groups& groups)
    : params_(params), groups_(groups), places_(params.params().size()) {
  place(groups.tensor, /*dealt=*/false);
  place(groups.expert_tensor, /*dealt=*/true);
  list();
}

Collectives& WeightView::ranks_of(size_t i) const {
  return params_.params()[i].is_dealt ? groups_.expert_tensor : groups_.tensor;
}

void WeightView::place(Collectives& ranks, bool dealt) {
  const auto num_params = static_cast<int64_t>(places_.size());
  const auto is_other = [&](int64_t i) {
    const Param& param = params_.params()[i];
    return param.is_dealt != dealt || param.cut.is_whole();
  };
  const auto& params = params_.params();
  const bool has_any = std::any_of(
      params.begin(), params.end(), [&](const Param& param) { return param.is_dealt == dealt; });
  if (ranks.is_alone() || !has_any) return;
  at::Tensor own = at::zeros({num_params, 2}, at::kLong);
  for (int64_t i = 0; i < num_params; ++i) {
    const Param& param = params_.params()[i];
    if (is_other(i)) continue;
    own[i][0].fill_(param.cut.begin);
    own[i][1].fill_(param.master.size(param.cut.dim));
  }
  const at::Tensor all = ranks.all_gather(own);  // [n, params, 2]
  const int64_t* value = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_params; ++i) {
    if (is_other(i)) continue;
    Places& places = places_[i];
    for (int64_t r = 0; r < ranks.size(); ++r) {
      places.begin.push_back(value[(r * num_params + i) * 2]);
      places.count.push_back(value[(r * num_params + i) * 2 + 1]);
      places.longest = std::max(places.longest, places.count.back());
    }
  }
}

// The cut dimension comes first on the way, padded to the longest run: ranks may hold unequal ones.
at::Tensor WeightView::gathered(size_t i, const at::Tensor& own) const {
  const Cut& cut = params_.params()[i].cut;
  Collectives& ranks = ranks_of(i);
  if (cut.is_whole() || ranks.is_alone()) return own;
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
  const at::Tensor pieces = ranks.all_gather(piece);
  at::Tensor whole = at::empty(cut.whole_shape(own.sizes()), own.options());
  for (int64_t r = 0; r < ranks.size(); ++r) {
    whole.narrow(cut.dim, places.begin[r], places.count[r])
        .copy_(pieces[r].narrow(0, 0, places.count[r]).transpose(0, cut.dim));
  }
  return whole;
}

// A line per parameter: stage, unit, place in the table, 1 for a dealt-out expert, name, dtype,
// sizes of the whole tensor. A name that a stage before has is a copy (a tied head).
void WeightView::list() {
  std::ostringstream own;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Param& param = params_.params()[i];
    own << groups_.pipeline.rank() << ' ' << param.unit << ' ' << i << ' ' << param.is_dealt << ' '
        << param.name << ' ' << static_cast<int>(param.master.scalar_type());
    for (const int64_t size : param.cut.whole_shape(param.master.sizes())) own << ' ' << size;
    own << '\n';
  }
  std::string stages;
  for (const std::string& stage : groups_.pipeline.all_gather_bytes(own.str())) stages += stage;
  std::set<std::string> seen;
  int64_t holder = 0;
  for (const std::string& lines : groups_.expert.all_gather_bytes(stages)) {
    std::istringstream in(lines);
    std::string line;
    while (std::getline(in, line)) {
      std::istringstream words(line);
      Whole whole;
      bool is_dealt = false;
      int dtype = 0;
      words >> whole.stage >> whole.unit >> whole.param >> is_dealt >> whole.name >> dtype;
      whole.holder = is_dealt ? holder : -1;
      whole.dtype = static_cast<at::ScalarType>(dtype);
      for (int64_t size = 0; words >> size;) whole.shape.push_back(size);
      if (seen.insert(whole.name).second) all_.push_back(std::move(whole));
    }
    ++holder;
  }
  bring_experts_together();
}

// Those of a layer where the first of them stands.
void WeightView::bring_experts_together() {
  std::map<std::pair<int64_t, int64_t>, size_t> first;  // by stage and unit
  for (size_t i = 0; i < all_.size(); ++i) {
    Whole& whole = all_[i];
    const bool is_dealt = whole.holder >= 0;
    whole.place = is_dealt ? first.try_emplace({whole.stage, whole.unit}, i).first->second : i;
  }
  std::stable_sort(
      all_.begin(), all_.end(), [](const Whole& a, const Whole& b) { return a.place < b.place; });
}

void WeightView::each(const Visit& visit) const {
  std::vector<at::Tensor> masters;
  for (const Param& param : params_.params()) masters.push_back(param.master);
  each_of(masters, visit);
}

void WeightView::each_of(const std::vector<at::Tensor>& own, const Visit& visit) const {
  BANYAN_ASSERT(own.size() == places_.size(), "weight view: got ", own.size(), " tensors");
  const at::Device device = own.empty() ? at::Device(at::kCPU) : own[0].device();
  for (const Whole& whole : all_) {
    const bool is_stage = whole.stage == groups_.pipeline.rank();
    const bool is_here = is_stage && (whole.holder < 0 || whole.holder == groups_.expert.rank());
    at::Tensor tensor = is_here
                            ? gathered(whole.param, own[whole.param]).contiguous()
                            : at::empty(whole.shape, at::TensorOptions(device).dtype(whole.dtype));
    if (is_stage && whole.holder >= 0) groups_.expert.broadcast(tensor, whole.holder);
    groups_.pipeline.broadcast(tensor, whole.stage);
    visit(whole.name, tensor);
  }
}

}  // namespace banyan::parallel
