// Sort, longest common prefixes of neighbours, then the two thresholds of specification A2:
//   * neighbours that agree on fewer than min_prefix_len tokens share nothing;
//   * a node needs min_group_size = G samples. Neighbours i-1, i share d tokens iff some G
//   consecutive samples
//     around them agree on d, so the shared length is the opening of the prefix lengths by windows
//     of G - 1: minimum over each window, then maximum over the windows that hold i.
#include "banyan/trie/detail/order.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>

#include "banyan/core/error.h"

namespace banyan::trie::detail {
namespace {

void check_samples(const std::vector<Sample>& samples, const BuildOptions& options) {
  BANYAN_CHECK(options.min_prefix_len >= 1,
               "[trie] min_prefix_len: wanted >= 1, got ",
               options.min_prefix_len);
  BANYAN_CHECK(options.min_group_size >= 2,
               "[trie] min_group_size: wanted >= 2, got ",
               options.min_group_size);
  int64_t total = 0;
  for (const Sample& sample : samples) {
    const size_t length = sample.tokens.size();
    BANYAN_CHECK(length > 0, "[trie] sample ", sample.uid, ": wanted at least one token, got none");
    BANYAN_CHECK(sample.positions.empty() || sample.positions.size() == length,
                 "[trie] sample ",
                 sample.uid,
                 " positions: wanted none or ",
                 length,
                 ", got ",
                 sample.positions.size());
    BANYAN_CHECK(sample.scored.empty() || sample.scored.size() == length,
                 "[trie] sample ",
                 sample.uid,
                 " scored: wanted none or ",
                 length,
                 ", got ",
                 sample.scored.size());
    total += static_cast<int64_t>(length);
  }
  BANYAN_CHECK(total <= std::numeric_limits<int32_t>::max(),
               "[trie] batch: wanted at most 2147483647 tokens, got ",
               total);
}

int32_t position(const Sample& sample, size_t t) {
  return sample.positions.empty() ? static_cast<int32_t>(t) : sample.positions[t];
}

// Leading tokens on which two samples have equal keys.
size_t common_prefix(const Sample& a, const Sample& b) {
  const size_t length = std::min(a.tokens.size(), b.tokens.size());
  const int32_t* tokens = a.tokens.data();
  size_t same = std::mismatch(tokens, tokens + length, b.tokens.data()).first - tokens;
  if (a.positions.empty() && b.positions.empty()) return same;
  for (size_t t = 0; t < same; ++t) {
    if (position(a, t) != position(b, t)) return t;
  }
  return same;
}

bool before(const Sample& a, const Sample& b, int32_t index_a, int32_t index_b) {
  const size_t d = common_prefix(a, b);
  const bool a_ends = d == a.tokens.size();
  const bool b_ends = d == b.tokens.size();
  if (a_ends || b_ends) {
    if (a_ends != b_ends) return a_ends;
    return a.uid != b.uid ? a.uid < b.uid : index_a < index_b;
  }
  if (a.tokens[d] != b.tokens[d]) return a.tokens[d] < b.tokens[d];
  return position(a, d) < position(b, d);
}

// best(values[i], ..., values[i + width - 1]) for every window, by a monotone queue.
template <typename Better>
std::vector<int32_t> slide(const std::vector<int32_t>& values, int32_t width, Better better) {
  std::vector<int32_t> out;
  std::deque<int32_t> queue;
  for (int32_t i = 0; i < static_cast<int32_t>(values.size()); ++i) {
    while (!queue.empty() && !better(values[queue.back()], values[i])) queue.pop_back();
    queue.push_back(i);
    if (queue.front() <= i - width) queue.pop_front();
    if (i >= width - 1) out.push_back(values[queue.front()]);
  }
  return out;
}

// The opening of shared[1..S) by windows of G - 1 (see the top).
void require_group(std::vector<int32_t>& shared, int32_t group) {
  const auto pairs = static_cast<int32_t>(shared.size()) - 1;
  const int32_t width = group - 1;
  if (width <= 1 || pairs <= 0) return;
  if (pairs < width) {
    std::fill(shared.begin(), shared.end(), 0);
    return;
  }
  const std::vector<int32_t> lengths(shared.begin() + 1, shared.end());
  const std::vector<int32_t> lowest = slide(lengths, width, std::less<>());
  std::vector<int32_t> padded(lowest.size() + 2 * (width - 1), 0);
  std::copy(lowest.begin(), lowest.end(), padded.begin() + width - 1);
  const std::vector<int32_t> opened = slide(padded, width, std::greater<>());
  std::copy(opened.begin(), opened.end(), shared.begin() + 1);
}

}  // namespace

Order order_samples(const std::vector<Sample>& samples, const BuildOptions& options) {
  check_samples(samples, options);
  Order order;
  order.samples.resize(samples.size());
  order.shared.assign(samples.size(), 0);
  std::iota(order.samples.begin(), order.samples.end(), 0);
  std::sort(order.samples.begin(), order.samples.end(), [&](int32_t a, int32_t b) {
    return before(samples[a], samples[b], a, b);
  });
  if (!options.share) return order;
  for (size_t i = 1; i < samples.size(); ++i) {
    const size_t same = common_prefix(samples[order.samples[i - 1]], samples[order.samples[i]]);
    const bool enough = same >= static_cast<size_t>(options.min_prefix_len);
    order.shared[i] = enough ? static_cast<int32_t>(same) : 0;
  }
  require_group(order.shared, options.min_group_size);
  return order;
}

}  // namespace banyan::trie::detail
