#include "banyan/rollout/runner.h"

namespace banyan::rollout {
namespace {

static_assert(kPageTokens == ops::kPathTile);

int32_t token_at(const Group& group, const Run& run, int32_t position) {
  return run.child == kTrunk ? group.prompt()[position]
                             : group.token_at(group.sequences[run.child], position);
}

void copy(const PageCopy& page, ops::KvPool& pool) {
  switch (page.kind) {
    case PageCopy::Kind::kCopy:
      return pool.copy_page(page.from, page.to);
    case PageCopy::Kind::kSpill:
      return pool.spill_page(page.from, page.to);
    case PageCopy::Kind::kRestore:
      return pool.restore_page(page.from, page.to);
  }
}

}  // namespace

at::Tensor Runner::run(const Pass& pass, const Scheduler& scheduler) {
  for (const PageCopy& page : pass.copies) copy(page, pool_);
  batch_.clear();
  for (const Run& run : pass.runs) {
    ops::PagedRun& paged = batch_.add_run();
    paged.num_tokens = run.num_tokens;
    paged.first_position = run.first_position;
    const std::span<const int32_t> pages = scheduler.pages_of(run);
    paged.pages.assign(pages.begin(), pages.end());
    const Group& group = scheduler.group(run.group);
    for (int32_t i = 0; i < run.num_tokens; ++i) {
      batch_.ids().push_back(token_at(group, run, run.first_position + i));
    }
  }
  for (const DrawRow& draw : pass.decodes) batch_.want(draw.row);
  for (const DrawRow& draw : pass.trunks) batch_.want(draw.row);
  for (const PromptRows& rows : pass.prompt_rows) {
    for (int32_t i = 0; i < rows.num_tokens; ++i) batch_.want(rows.row + i);
  }
  batch_.finish(pool_.num_pages(), model_.shape().vocab);
  const at::Tensor hidden = model_.infer(pool_, batch_);
  return batch_.num_wanted() == 0 ? at::Tensor() : hidden;
}

}  // namespace banyan::rollout
