#include "banyan/core/rng.h"

namespace banyan {
namespace {

constexpr uint32_t kMul0 = 0xD2511F53u;
constexpr uint32_t kMul1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u;
constexpr uint32_t kWeyl1 = 0xBB67AE85u;

uint64_t join(const std::array<uint32_t, 4>& words, int low) {
  return uint64_t{words[low]} | (uint64_t{words[low + 1]} << 32);
}

}  // namespace

std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter_low),
                               static_cast<uint32_t>(counter_low >> 32),
                               static_cast<uint32_t>(counter_high),
                               static_cast<uint32_t>(counter_high >> 32)};
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kMul0} * x[0];
    const uint64_t p1 = uint64_t{kMul1} * x[2];
    x = {static_cast<uint32_t>(p1 >> 32) ^ x[1] ^ k0,
         static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ x[3] ^ k1,
         static_cast<uint32_t>(p0)};
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return x;
}

float uniform(const NoiseKey& key, uint64_t position) {
  // The key folds (seed, step) through one Philox block; (row, index, position) are the counter.
  const uint64_t folded = join(philox(key.seed, key.step, 0x62616e79616eULL), 0);
  const auto words = philox(folded, key.row, (key.index << 40) ^ position);
  return static_cast<float>(words[0] >> 8) * 0x1.0p-24f;
}

}  // namespace banyan
