#include "banyan/parallel/expert_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include "banyan/core/error.h"

namespace banyan::parallel {

ExpertExchange::ExpertExchange(Collectives& ranks, const std::vector<int64_t>& offsets)
    : ranks_(ranks) {
  const int64_t num_ranks = ranks.size();
  const auto num_experts = static_cast<int64_t>(offsets.size()) - 1;
  BANYAN_ASSERT(num_experts % num_ranks == 0,
                num_experts,
                " experts are not dealt out evenly over ",
                num_ranks);
  const int64_t num_own = num_experts / num_ranks;
  at::Tensor counts = at::empty({num_experts}, at::kLong);
  for (int64_t e = 0; e < num_experts; ++e) {
    counts.data_ptr<int64_t>()[e] = offsets[e + 1] - offsets[e];
  }
  const at::Tensor all = ranks.all_gather(counts);  // [n, X]
  const int64_t* count = all.const_data_ptr<int64_t>();
  const int64_t first = ranks.rank() * num_own;
  own_offsets_.assign(num_own + 1, 0);
  int64_t num_rows = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    sent_.push_back(offsets[(r + 1) * num_own] - offsets[r * num_own]);
    received_.push_back(0);
    for (int64_t e = 0; e < num_own; ++e) {
      const int64_t rows = count[r * num_experts + first + e];
      received_.back() += rows;
      own_offsets_[e + 1] += rows;
    }
    num_rows += received_.back();
  }
  for (int64_t e = 0; e < num_own; ++e) own_offsets_[e + 1] += own_offsets_[e];

  by_expert_ = at::empty({num_rows}, at::kLong);
  by_source_ = at::empty({num_rows}, at::kLong);
  std::vector<int64_t> next(own_offsets_.begin(), own_offsets_.end() - 1);
  int64_t came = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t e = 0; e < num_own; ++e) {
      for (int64_t i = count[r * num_experts + first + e]; i > 0; --i, ++came) {
        by_expert_.data_ptr<int64_t>()[next[e]] = came;
        by_source_.data_ptr<int64_t>()[came] = next[e]++;
      }
    }
  }
}

at::Tensor ExpertExchange::to_experts(const at::Tensor& rows) const {
  const at::Tensor came = ranks_.all_to_all(rows.contiguous(), received_, sent_);
  return at::index_select(came, 0, by_expert_.to(came.device()));
}

at::Tensor ExpertExchange::to_tokens(const at::Tensor& rows) const {
  const at::Tensor sorted = at::index_select(rows, 0, by_source_.to(rows.device()));
  return ranks_.all_to_all(sorted, sent_, received_);
}

}  // namespace banyan::parallel
