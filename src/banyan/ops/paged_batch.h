// The tokens of one pass of the rollout as every layer reads them: ids, positions, pages, and the
// rows that are wanted. Filled anew each pass, in memory that is kept.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/kernels/cpu/decoder_pass.h"

namespace banyan::ops {

// Consecutive tokens of one sequence: a prefill chunk, or the one token of a decode. Runs of
// siblings stand next to each other, so a page that they share is read once.
struct PagedRun {
  int32_t num_tokens = 0;      // tokens of this run in the batch
  int32_t first_position = 0;  // path position of its first token
  std::vector<int32_t> pages;  // pages of path positions 0..first_position + num_tokens - 1
};

// Throws [paged_attention] if the run is empty, too short of pages, or names a page that a pool of
// num_pages lacks.
void check_run(const PagedRun& run, int64_t num_pages);

class PagedBatch {
 public:
  void clear();
  // The next run, to be filled in place (its pages have the capacity of an earlier pass); its token
  // ids are appended to ids(), in order.
  PagedRun& add_run();
  std::vector<int32_t>& ids() { return ids_; }
  // Rows whose hidden states are returned, in the order of these calls.
  void want(int32_t token) { wanted_.push_back(token); }
  // Siblings attend a shared page together (numerically the same). Kept by clear().
  void set_grouped(bool grouped) { grouped_ = grouped; }
  // Derives the rest; the batch is ready. Throws as check_run, and [paged_batch] if ids do not
  // match the runs or are no tokens of the vocabulary.
  void finish(int64_t num_pages, int64_t vocabulary);

  int64_t num_tokens() const { return static_cast<int64_t>(ids_.size()); }
  int64_t num_wanted() const { return static_cast<int64_t>(wanted_.size()); }
  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<int32_t>& positions() const { return positions_; }
  const std::vector<int32_t>& wanted() const { return wanted_; }
  int32_t last_position() const { return last_position_; }
  bool grouped() const { return grouped_; }
  // Copies, for PagedAttention.
  std::vector<PagedRun> runs() const { return {runs_.begin(), runs_.begin() + num_runs_}; }
  // Borrowed from the batch.
  kernels::PassRows rows() const;

 private:
  std::vector<PagedRun> runs_;  // the first num_runs_ are of this pass
  int64_t num_runs_ = 0;
  std::vector<int32_t> ids_;
  std::vector<int32_t> wanted_;
  bool grouped_ = true;
  // Derived, per token.
  std::vector<int32_t> positions_;
  std::vector<int32_t> visible_;
  std::vector<int32_t> run_of_;
  std::vector<const int32_t*> pages_;
  std::vector<kernels::PageWrite> writes_;
  int32_t last_position_ = 0;
};

}  // namespace banyan::ops
