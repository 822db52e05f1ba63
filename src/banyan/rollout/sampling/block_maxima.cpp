#include "banyan/rollout/sampling/block_maxima.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "banyan/kernels/cpu/multiversion.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kBlock = 256;
constexpr int32_t kLaneCount = 16;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// lanes[block, l] = the largest of z[block * 256 + l], z[... + 16 + l], ...
BANYAN_MULTIVERSION void lane_maxima(const float* z, int32_t vocab, float* lanes) {
  for (int32_t begin = 0; begin < vocab; begin += kBlock, lanes += kLaneCount) {
    const int32_t end = std::min(vocab, begin + kBlock);
    float best[kLaneCount];
    for (int32_t l = 0; l < kLaneCount; ++l) best[l] = kLowest;
    int32_t i = begin;
    for (; i + kLaneCount <= end; i += kLaneCount) {
      for (int32_t l = 0; l < kLaneCount; ++l) best[l] = z[i + l] > best[l] ? z[i + l] : best[l];
    }
    for (int32_t l = 0; i < end; ++i, ++l) best[l] = z[i] > best[l] ? z[i] : best[l];
    for (int32_t l = 0; l < kLaneCount; ++l) lanes[l] = best[l];
  }
}

BANYAN_MULTIVERSION int32_t count_before(const float* z, int32_t vocab, float logit, int32_t id) {
  int32_t count = 0;
  for (int32_t i = 0; i < vocab; ++i) {
    count += (z[i] > logit) | ((z[i] == logit) & (i < id));
  }
  return count;
}

}  // namespace

BlockMaxima::BlockMaxima(int32_t vocab)
    : vocab_(vocab),
      lanes_(static_cast<size_t>((vocab + kBlock - 1) / kBlock * kLaneCount)),
      maxima_(static_cast<size_t>((vocab + kBlock - 1) / kBlock)) {}

void BlockMaxima::load(const float* z) {
  z_ = z;
  lane_maxima(z, vocab_, lanes_.data());
  for (size_t b = 0; b < maxima_.size(); ++b) {
    const float* const lanes = lanes_.data() + b * kLaneCount;
    maxima_[b] = *std::max_element(lanes, lanes + kLaneCount);
  }
  max_ = *std::max_element(maxima_.begin(), maxima_.end());
}

float BlockMaxima::reached_by(int32_t k) {
  if (k == 1) return max_;
  // Each maximum is a logit of its own, so the k-th largest maximum is reached by k logits. The
  // more maxima there are beside k, the nearer it is to the k-th largest logit.
  const auto count = static_cast<size_t>(k);
  const std::vector<float>& from = 4 * count <= maxima_.size() ? maxima_ : lanes_;
  if (count > from.size()) return kLowest;
  selected_ = from;
  const auto kth = selected_.begin() + (k - 1);
  std::nth_element(selected_.begin(), kth, selected_.end(), std::greater<>());
  return *kth;
}

void BlockMaxima::gather(float floor, std::vector<Candidate>& out) const {
  for (size_t b = 0; b < maxima_.size(); ++b) {
    if (!(maxima_[b] >= floor)) continue;
    const int32_t begin = static_cast<int32_t>(b) * kBlock;
    const int32_t end = std::min(vocab_, begin + kBlock);
    for (int32_t i = begin; i < end; ++i) {
      if (z_[i] >= floor) out.push_back({.logit = z_[i], .id = i});
    }
  }
}

void BlockMaxima::first(int32_t k, std::vector<Candidate>& out) {
  out.clear();
  if (k <= 0) return;
  gather(k < vocab_ ? reached_by(k) : kLowest, out);
  const size_t count = std::min(static_cast<size_t>(k), out.size());
  std::partial_sort(
      out.begin(), out.begin() + static_cast<int64_t>(count), out.end(), comes_before);
  out.resize(count);
}

int32_t tokens_before(const float* z, int32_t vocab, const Candidate& token) {
  return count_before(z, vocab, token.logit, token.id);
}

}  // namespace banyan::rollout
