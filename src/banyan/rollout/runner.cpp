#include "banyan/rollout/runner.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <utility>

namespace banyan::rollout {
namespace {

static_assert(kPageTokens == ops::kPathTile);

int32_t token_at(const Group& group, const Run& run, int32_t position) {
  return run.child == kTrunk ? group.prompt()[position]
                             : group.token_at(group.sequences[run.child], position);
}

int64_t num_rows(const Pass& pass) {
  auto count = static_cast<int64_t>(pass.decodes.size() + pass.trunks.size());
  for (const PromptRows& rows : pass.prompt_rows) count += rows.num_tokens;
  return count;
}

// Rows drawn from, decodes first, as an index.
at::Tensor row_index(const Pass& pass) {
  at::Tensor index = at::empty({num_rows(pass)}, at::kLong);
  int64_t* out = index.mutable_data_ptr<int64_t>();
  for (const DrawRow& draw : pass.decodes) *out++ = draw.row;
  for (const DrawRow& draw : pass.trunks) *out++ = draw.row;
  for (const PromptRows& rows : pass.prompt_rows) {
    for (int32_t i = 0; i < rows.num_tokens; ++i) *out++ = rows.row + i;
  }
  return index;
}

}  // namespace

at::Tensor Runner::run(const Pass& pass, const Scheduler& scheduler) {
  for (const PageCopy& copy : pass.copies) pool_.copy_page(copy.from, copy.to);
  if (!ids_.defined() || ids_.size(0) < pass.num_tokens) {
    ids_ = at::empty({pass.num_tokens}, at::kInt);
    positions_ = at::empty({pass.num_tokens}, at::kInt);
  }
  int32_t* ids = ids_.mutable_data_ptr<int32_t>();
  int32_t* positions = positions_.mutable_data_ptr<int32_t>();
  std::vector<ops::PagedRun> paged(pass.runs.size());
  for (size_t r = 0; r < pass.runs.size(); ++r) {
    const Run& run = pass.runs[r];
    const Group& group = scheduler.group(run.group);
    for (int32_t i = 0; i < run.num_tokens; ++i) {
      const int32_t position = run.first_position + i;
      *ids++ = token_at(group, run, position);
      *positions++ = position;
    }
    paged[r].num_tokens = run.num_tokens;
    paged[r].first_position = run.first_position;
    const std::span<const int32_t> pages = scheduler.pages_of(run);
    paged[r].pages.assign(pages.begin(), pages.end());
  }
  ops::PagedAttention attention(pool_, std::move(paged));
  const at::Device device = model_.options().device;
  const at::Tensor hidden = model_.forward(ids_.narrow(0, 0, pass.num_tokens).to(device),
                                           positions_.narrow(0, 0, pass.num_tokens).to(device),
                                           attention,
                                           /*saved=*/nullptr);
  const int64_t count = num_rows(pass);
  if (count == 0) return {};
  // In steady decoding every row is drawn from, in order.
  if (static_cast<int64_t>(pass.decodes.size()) == pass.num_tokens) return hidden;
  return at::index_select(hidden, 0, row_index(pass).to(device));
}

}  // namespace banyan::rollout
