// Where the large logits of a row are. One pass keeps the maximum of each block of 256 ids and of
// its 16 interleaved lanes; with them a bound that k logits reach is found without sorting, and the
// few logits above a bound are gathered from the blocks that have any. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace banyan::rollout {

struct Candidate {
  float logit = 0.0f;
  int32_t id = 0;
};

// The order of tokens everywhere: the larger logit first, of equal ones the lower id.
inline bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

class BlockMaxima {
 public:
  explicit BlockMaxima(int32_t vocab);

  // Reads z [vocab], borrowed until the next load. O(vocab).
  void load(const float* z);
  float max() const { return max_; }
  // A number that at least k logits reach, near the k-th largest; -inf for a large k.
  float reached_by(int32_t k);
  // Appends every token with logit >= floor, ids ascending.
  void gather(float floor, std::vector<Candidate>& out) const;
  // The first k tokens in order. `out` is replaced.
  void first(int32_t k, std::vector<Candidate>& out);

 private:
  int32_t vocab_;
  const float* z_ = nullptr;
  float max_ = 0.0f;
  std::vector<float> lanes_;   // [blocks, 16]
  std::vector<float> maxima_;  // [blocks]
  std::vector<float> selected_;
};

// How many tokens come before `token` in order.
int32_t tokens_before(const float* z, int32_t vocab, const Candidate& token);

}  // namespace banyan::rollout
