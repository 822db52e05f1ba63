#include "banyan/ops/paged_batch.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::ops {

void check_run(const PagedRun& run, int64_t num_pages) {
  const int64_t length = static_cast<int64_t>(run.first_position) + run.num_tokens;
  BANYAN_CHECK(run.num_tokens >= 1 && run.first_position >= 0,
               "[paged_attention] run: wanted >= 1 token at a position >= 0, got ",
               run.num_tokens,
               " at ",
               run.first_position);
  BANYAN_CHECK(static_cast<int64_t>(run.pages.size()) * kernels::kTileTokens >= length,
               "[paged_attention] pages of a run: wanted ",
               kernels::divide_up(length, kernels::kTileTokens),
               " for ",
               length,
               " positions, got ",
               run.pages.size());
  for (const int32_t page : run.pages) {
    BANYAN_CHECK(page >= 0 && page < num_pages,
                 "[paged_attention] page: wanted 0 .. ",
                 num_pages - 1,
                 ", got ",
                 page);
  }
}

void PagedBatch::clear() {
  num_runs_ = 0;
  ids_.clear();
  wanted_.clear();
}

PagedRun& PagedBatch::add_run() {
  if (num_runs_ == static_cast<int64_t>(runs_.size())) runs_.emplace_back();
  PagedRun& run = runs_[num_runs_++];
  run.pages.clear();
  return run;
}

void PagedBatch::finish(int64_t num_pages, int64_t vocabulary) {
  positions_.clear();
  visible_.clear();
  run_of_.clear();
  pages_.clear();
  writes_.clear();
  last_position_ = 0;
  for (int64_t r = 0; r < num_runs_; ++r) {
    const PagedRun& run = runs_[r];
    check_run(run, num_pages);
    for (int32_t i = 0; i < run.num_tokens; ++i) {
      const int32_t position = run.first_position + i;
      if (i == 0 || position % kernels::kTileTokens == 0) {
        writes_.push_back({static_cast<int32_t>(positions_.size()), 0});
      }
      ++writes_.back().count;
      positions_.push_back(position);
      visible_.push_back(position + 1);
      run_of_.push_back(static_cast<int32_t>(r));
      pages_.push_back(run.pages.data());
      last_position_ = std::max(last_position_, position);
    }
  }
  BANYAN_CHECK(positions_.size() == ids_.size(),
               "[paged_batch] ids: wanted one for each of the ",
               positions_.size(),
               " tokens of the runs, got ",
               ids_.size());
  for (const int32_t id : ids_) {
    BANYAN_CHECK(id >= 0 && id < vocabulary,
                 "[paged_batch] token: wanted an id in [0, ",
                 vocabulary,
                 "), got ",
                 id);
  }
  for (const int32_t token : wanted_) {
    BANYAN_ASSERT(token >= 0 && token < num_tokens(), "paged batch: wanted row ", token);
  }
}

kernels::PassRows PagedBatch::rows() const {
  return {.num_tokens = num_tokens(),
          .ids = ids_.data(),
          .positions = positions_.data(),
          .pages = pages_.data(),
          .visible = visible_.data(),
          .runs = grouped_ ? nullptr : run_of_.data(),
          .writes = writes_.data(),
          .num_writes = static_cast<int64_t>(writes_.size()),
          .wanted = wanted_.data(),
          .num_wanted = num_wanted()};
}

}  // namespace banyan::ops
