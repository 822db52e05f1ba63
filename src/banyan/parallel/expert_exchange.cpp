#include "banyan/parallel/expert_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

// [X] rows of each expert.
at::Tensor counts_of(const std::vector<int64_t>& offsets) {
  const auto num_experts = static_cast<int64_t>(offsets.size()) - 1;
  at::Tensor counts = at::empty({num_experts}, at::kLong);
  for (int64_t e = 0; e < num_experts; ++e) {
    counts.data_ptr<int64_t>()[e] = offsets[e + 1] - offsets[e];
  }
  return counts;
}

}  // namespace

ExpertExchange::Arrival ExpertExchange::arrival_of(const at::Tensor& counts,
                                                   int64_t first,
                                                   int64_t num) {
  const int64_t* count = counts.const_data_ptr<int64_t>();
  const int64_t num_ranks = counts.size(0);
  const int64_t num_experts = counts.size(1);
  Arrival out;
  out.offsets.assign(num + 1, 0);
  int64_t num_rows = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    out.sizes.push_back(0);
    for (int64_t e = 0; e < num; ++e) {
      const int64_t rows = count[r * num_experts + first + e];
      out.sizes.back() += rows;
      out.offsets[e + 1] += rows;
    }
    num_rows += out.sizes.back();
  }
  for (int64_t e = 0; e < num; ++e) out.offsets[e + 1] += out.offsets[e];

  out.by_expert = at::empty({num_rows}, at::kLong);
  out.by_source = at::empty({num_rows}, at::kLong);
  std::vector<int64_t> next(out.offsets.begin(), out.offsets.end() - 1);
  int64_t came = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t e = 0; e < num; ++e) {
      for (int64_t i = count[r * num_experts + first + e]; i > 0; --i, ++came) {
        out.by_expert.data_ptr<int64_t>()[next[e]] = came;
        out.by_source.data_ptr<int64_t>()[came] = next[e]++;
      }
    }
  }
  return out;
}

ExpertExchange::ExpertExchange(Collectives& ranks,
                               const std::vector<int64_t>& offsets,
                               Collectives* parts)
    : ranks_(ranks), parts_(is_alone(parts) ? nullptr : parts) {
  const int64_t num_ranks = ranks.size();
  const auto num_experts = static_cast<int64_t>(offsets.size()) - 1;
  BANYAN_ASSERT(num_experts % num_ranks == 0,
                num_experts,
                " experts are not dealt out evenly over ",
                num_ranks);
  const int64_t num_own = num_experts / num_ranks;
  for (int64_t r = 0; r < num_ranks; ++r) {
    sent_.push_back(offsets[(r + 1) * num_own] - offsets[r * num_own]);
  }
  by_rank_ = arrival_of(ranks.all_gather(counts_of(offsets)), ranks.rank() * num_own, num_own);
  if (parts_ == nullptr) return;
  by_part_ = arrival_of(parts_->all_gather(counts_of(by_rank_.offsets)), 0, num_own);
}

std::vector<int64_t> ExpertExchange::own_to_each() const {
  return std::vector<int64_t>(parts_->size(), by_rank_.offsets.back());
}

at::Tensor ExpertExchange::to_experts(const at::Tensor& rows) const {
  const at::Tensor came = ranks_.all_to_all(rows.contiguous(), by_rank_.sizes, sent_);
  const at::Tensor mine = at::index_select(came, 0, by_rank_.by_expert.to(came.device()));
  if (parts_ == nullptr) return mine;
  const at::Tensor copies = at::cat(std::vector<at::Tensor>(parts_->size(), mine), 0);
  const at::Tensor all = parts_->all_to_all(copies, by_part_.sizes, own_to_each());
  return at::index_select(all, 0, by_part_.by_expert.to(all.device()));
}

at::Tensor ExpertExchange::to_tokens(const at::Tensor& rows) const {
  at::Tensor mine = rows;
  if (parts_ != nullptr) {
    const at::Tensor sorted = at::index_select(rows, 0, by_part_.by_source.to(rows.device()));
    const at::Tensor terms = parts_->all_to_all(sorted, own_to_each(), by_part_.sizes);
    const int64_t own = by_rank_.offsets.back();
    const bool is_double = rows.scalar_type() == at::kDouble;
    at::Tensor sum = terms.narrow(0, 0, own).to(
        is_double ? at::kDouble : at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    for (int64_t r = 1; r < parts_->size(); ++r) sum.add_(terms.narrow(0, r * own, own));
    mine = sum.to(rows.scalar_type());
  }
  const at::Tensor sorted = at::index_select(mine, 0, by_rank_.by_source.to(rows.device()));
  return ranks_.all_to_all(sorted, sent_, by_rank_.sizes);
}

}  // namespace banyan::parallel
