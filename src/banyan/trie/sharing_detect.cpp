// One walk over the rows in batch order. `first[place]` is the row that computed a token first, so
// a row's reusable tokens are the leading ones of its path that have a first row. Both rules use
// the same walk; the older one runs it on the fully merged trie and also counts the rows through
// each node.
#include "banyan/trie/sharing_detect.h"

#include <algorithm>
#include <map>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/trie/trie.h"

namespace banyan::trie {
namespace {

// Collects the rows' decisions and numbers the groups.
class Collector {
 public:
  explicit Collector(size_t batch_size) {
    out_.batch_size = static_cast<int32_t>(batch_size);
    out_.group_ids.assign(batch_size, -1);
    out_.prefix_lens.assign(batch_size, 0);
    out_.is_provider.assign(batch_size, 1);
    for (int32_t row = 0; row < out_.batch_size; ++row) out_.provider_index.push_back(row);
  }

  void reuse(int32_t row, int32_t provider, int32_t prefix_len) {
    const auto [at, is_new] =
        group_of_.try_emplace({provider, prefix_len}, static_cast<int32_t>(out_.groups.size()));
    if (is_new) out_.groups.push_back({at->second, {provider}, prefix_len, provider});
    out_.groups[at->second].member_indices.push_back(row);
    out_.reuse_specs.push_back({row, provider, prefix_len});
    out_.provider_index[row] = provider;
    out_.prefix_lens[row] = prefix_len;
    out_.is_provider[row] = 0;
    out_.group_ids[row] = at->second;
    if (out_.group_ids[provider] < 0) out_.group_ids[provider] = at->second;
  }

  Detection take() { return std::move(out_); }

 private:
  Detection out_;
  std::map<std::pair<int32_t, int32_t>, int32_t> group_of_;  // (provider, length) -> group
};

// Leading tokens of `path` that an earlier row computed.
int32_t known_tokens(const std::vector<int32_t>& path, const std::vector<int32_t>& first) {
  const auto end = std::find_if(path.begin(), path.end(), [&](int32_t u) { return first[u] < 0; });
  return static_cast<int32_t>(end - path.begin());
}

void insert(int32_t row, const std::vector<int32_t>& path, std::vector<int32_t>& first) {
  for (const int32_t place : path) {
    if (first[place] < 0) first[place] = row;
  }
}

class TrieDetector final : public Detector {
 public:
  explicit TrieDetector(const DetectOptions& options) : options_(options) {}

  Detection detect(const std::vector<Sample>& rows) const override {
    const Trie trie = build(rows,
                            {.share = true,
                             .min_prefix_len = options_.min_prefix_len,
                             .min_group_size = options_.min_group_size});
    std::vector<std::vector<int32_t>> paths;
    for (size_t row = 0; row < rows.size(); ++row) {
      paths.push_back(trie.path(static_cast<int32_t>(row)));
    }
    return detect_paths(paths, trie.num_tokens());
  }

 private:
  DetectOptions options_;
};

class OnlineTrieDetector final : public Detector {
 public:
  explicit OnlineTrieDetector(const DetectOptions& options) : options_(options) {}

  Detection detect(const std::vector<Sample>& rows) const override {
    const Trie trie = build(rows, {.share = true, .min_prefix_len = 1, .min_group_size = 2});
    std::vector<int32_t> first(trie.num_tokens(), -1);
    std::vector<int32_t> rows_through(trie.num_tokens(), 0);
    Collector collector(rows.size());
    for (int32_t row = 0; row < static_cast<int32_t>(rows.size()); ++row) {
      const std::vector<int32_t> path = trie.path(row);
      const int32_t matched = known_tokens(path, first);
      if (matched >= options_.min_prefix_len) {
        const int32_t node = path[matched - 1];
        if (rows_through[node] + 1 >= options_.min_group_size) {
          collector.reuse(row, first[node], matched);
        }
      }
      insert(row, path, first);
      for (const int32_t node : path) ++rows_through[node];
    }
    return collector.take();
  }

 private:
  DetectOptions options_;
};

}  // namespace

std::unique_ptr<Detector> make_detector(const std::string& name, const DetectOptions& options) {
  BANYAN_CHECK(options.min_prefix_len >= 1,
               "[sharing] min_prefix_len: wanted >= 1, got ",
               options.min_prefix_len);
  BANYAN_CHECK(options.min_group_size >= 2,
               "[sharing] min_group_size: wanted >= 2, got ",
               options.min_group_size);
  if (name == "trie") return std::make_unique<TrieDetector>(options);
  BANYAN_CHECK(
      name == "trie_online", "[sharing] detector: wanted trie or trie_online, got '", name, "'");
  return std::make_unique<OnlineTrieDetector>(options);
}

Detection detect_paths(const std::vector<std::vector<int32_t>>& paths, int64_t num_places) {
  std::vector<int32_t> first(num_places, -1);
  Collector collector(paths.size());
  for (int32_t row = 0; row < static_cast<int32_t>(paths.size()); ++row) {
    const int32_t known = known_tokens(paths[row], first);
    if (known > 0) collector.reuse(row, first[paths[row][known - 1]], known);
    insert(row, paths[row], first);
  }
  return collector.take();
}

int32_t common_prefix_len(const std::vector<std::vector<int32_t>>& rows) {
  if (rows.empty()) return 0;
  size_t length = rows.front().size();
  for (const std::vector<int32_t>& row : rows) {
    const size_t both = std::min(length, row.size());
    length =
        std::mismatch(row.begin(), row.begin() + both, rows.front().begin()).first - row.begin();
  }
  return static_cast<int32_t>(length);
}

}  // namespace banyan::trie
