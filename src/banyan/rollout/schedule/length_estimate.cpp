#include "banyan/rollout/schedule/length_estimate.h"

#include <algorithm>
#include <cmath>

namespace banyan::rollout {
namespace {

constexpr size_t kRecent = 256;  // lengths remembered per source
constexpr size_t kEnough = 8;    // lengths before a source has a quantile
constexpr size_t kMaxSources = 1000;
constexpr double kLeastShare = 0.1;  // of max_new
constexpr double kRaise = 0.1;
constexpr double kLower = 0.05;
constexpr double kLeastQuantile = 0.1;
constexpr int32_t kQuietPasses = 600;
constexpr int64_t kPerRevision = 16;  // lengths

}  // namespace

int32_t LengthEstimate::source(const std::string& name) {
  const auto found = numbers_.find(name);
  if (found != numbers_.end()) return found->second;
  if (sources_.size() == kMaxSources) return static_cast<int32_t>(kMaxSources) - 1;
  numbers_.emplace(name, static_cast<int32_t>(sources_.size()));
  sources_.emplace_back();
  return static_cast<int32_t>(sources_.size()) - 1;
}

int32_t LengthEstimate::expected(int32_t source, int32_t max_new, int32_t drawn) const {
  const int32_t least = std::min(drawn + 1, max_new);
  double length = quantile_ * max_new;
  const std::vector<int32_t>& sorted = sources_[source].sorted;
  if (sorted.size() >= kEnough) {
    const auto longer = std::upper_bound(sorted.begin(), sorted.end(), drawn);
    const auto count = sorted.end() - longer;
    if (count == 0) return max_new;  // longer than any seen: nothing says that it will stop
    const auto rank = static_cast<std::ptrdiff_t>(quantile_ * static_cast<double>(count));
    length = longer[std::min(rank, count - 1)];
  }
  length = std::max(conservativeness_ * length, kLeastShare * max_new);
  const double ceiling = std::min(std::ceil(length - 1e-9), static_cast<double>(max_new));
  return std::max(least, static_cast<int32_t>(ceiling));
}

void LengthEstimate::add(int32_t source, int32_t length) {
  Source& seen = sources_[source];
  if (seen.recent.size() < kRecent) {
    seen.recent.push_back(length);
  } else {
    const auto old =
        std::lower_bound(seen.sorted.begin(), seen.sorted.end(), seen.recent[seen.next]);
    seen.sorted.erase(old);
    seen.recent[seen.next] = length;
    seen.next = (seen.next + 1) % kRecent;
  }
  seen.sorted.insert(std::upper_bound(seen.sorted.begin(), seen.sorted.end(), length), length);
  if (++num_added_ % kPerRevision == 0) ++revision_;
}

void LengthEstimate::on_preemption() {
  quantile_ = std::min(1.0, quantile_ + kRaise);
  quiet_passes_ = 0;
  ++revision_;
}

void LengthEstimate::on_quiet_pass() {
  if (++quiet_passes_ < kQuietPasses) return;
  quiet_passes_ = 0;
  ++revision_;
  quantile_ = std::max(kLeastQuantile, quantile_ - kLower);
}

}  // namespace banyan::rollout
