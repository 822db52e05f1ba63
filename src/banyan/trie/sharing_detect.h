// Who shares with whom, told row by row: the provider/reuser view of a trie in batch order
// (specification B5, "Detector"). The first row that passes through a node *provides* it; a later
// row *reuses* the deepest node on its path that is already there and runs only its suffix.
// Example: rows [1 2 3 4], [1 2 9], [1 2 3 7]: row 1 reuses 2 tokens of row 0, row 2 reuses 3.
//
// Two rules decide what may be reused:
//   trie         the nodes of the trie (A2): a node counts if enough samples of the *batch* share
//                it, whatever their order. The tokens that remain are the trie's unique tokens.
//   trie_online  the older rule: rows arrive one by one; the deepest matching node alone is looked
//                at, and it must be long enough and have enough rows so far, this one included.
// Torch-free. This view feeds logs and statistics; execution walks the trie itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "banyan/core/sample.h"

namespace banyan::trie {

struct ReuseSpec {
  int32_t reuse_idx = 0;     // row that reuses
  int32_t provider_idx = 0;  // earlier row that computed the last reused token
  int32_t prefix_len = 0;    // tokens that it does not compute again
  friend bool operator==(const ReuseSpec&, const ReuseSpec&) = default;
};

// All rows that reuse the same prefix of the same provider, the provider first.
struct SharingGroup {
  int32_t group_id = 0;
  std::vector<int32_t> member_indices;
  int32_t prefix_len = 0;
  int32_t provider_index = 0;
  friend bool operator==(const SharingGroup&, const SharingGroup&) = default;
};

struct Detection {
  int32_t batch_size = 0;
  std::vector<ReuseSpec> reuse_specs;  // ascending reuse_idx
  std::vector<SharingGroup> groups;    // in order of their first reuser
  // Per row. A reuser's group is the one it reuses in; a provider's the first that it provides;
  // -1 = none. A row that reuses nothing is its own provider with prefix 0.
  std::vector<int32_t> group_ids;
  std::vector<int32_t> provider_index;
  std::vector<int32_t> prefix_lens;
  std::vector<uint8_t> is_provider;  // 1 = not a reuser, so rows that share nothing count

  bool has_sharing() const { return !reuse_specs.empty(); }
};

struct DetectOptions {
  int32_t min_prefix_len = 1;  // >= 1
  int32_t min_group_size = 2;  // >= 2
};

// Throws [trie] on an empty row or a bad option.
class Detector {
 public:
  virtual ~Detector() = default;
  virtual Detection detect(const std::vector<Sample>& rows) const = 0;
};

// "trie" or "trie_online"; throws [sharing] for another name.
std::unique_ptr<Detector> make_detector(const std::string& name, const DetectOptions& options);

// The same view of rows that are laid out already: paths[r] holds the place (0 .. num_places - 1)
// of every token of row r, and rows that share a token name the same place. Used for plans whose
// blocks compute a trunk more than once. O(tokens).
Detection detect_paths(const std::vector<std::vector<int32_t>>& paths, int64_t num_places);

// Leading tokens that all rows have in common; the whole row if there is one, 0 if there is none.
int32_t common_prefix_len(const std::vector<std::vector<int32_t>>& rows);

}  // namespace banyan::trie
