// How long a response will be: a quantile of the lengths seen lately from its data source, so that
// enough pages are kept for what runs and not more. A guess too low costs a preemption, one too
// high an idle seat. Torch-free.
//
//   E = clamp(conservativeness * Q_p(lengths of the source), 0.1 * max_new, max_new)
//
// with p = 0.7 at the start, raised by every preemption, lowered after 600 passes without one.
// Before a source has been seen, Q is p * max_new. Of a response that has already outlived part of
// the lengths, only the longer ones count. (Rollout specification, section 4.)
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace banyan::rollout {

class LengthEstimate {
 public:
  explicit LengthEstimate(double conservativeness) : conservativeness_(conservativeness) {}

  // Number of a data source; sources beyond 1,000 share one.
  int32_t source(const std::string& name);
  // Tokens that a response of `drawn` tokens is expected to end with, at least
  // min(drawn + 1, max_new), at most max_new.
  int32_t expected(int32_t source, int32_t max_new, int32_t drawn) const;

  // A response ended by itself.
  void add(int32_t source, int32_t length);
  void on_preemption();
  void on_quiet_pass();

  double quantile() const { return quantile_; }
  // Changes when expectations have changed enough to look at an order again.
  int64_t revision() const { return revision_; }

 private:
  struct Source {
    std::vector<int32_t> recent;  // the last lengths, a ring
    size_t next = 0;
    std::vector<int32_t> sorted;
  };

  double conservativeness_;
  double quantile_ = 0.7;
  int32_t quiet_passes_ = 0;
  int64_t num_added_ = 0;
  int64_t revision_ = 0;
  std::unordered_map<std::string, int32_t> numbers_;
  std::vector<Source> sources_;
};

}  // namespace banyan::rollout
