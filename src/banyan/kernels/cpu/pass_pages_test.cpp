// Pages of a pass are queued once, as far as they are seen, and fetching them changes no product.
#include "banyan/kernels/cpu/pass_pages.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <utility>
#include <vector>

#include "banyan/kernels/cpu/gemm.h"

namespace banyan::kernels {
namespace {

constexpr AttentionShape kShape{.num_heads = 4, .num_kv_heads = 2, .head_dim = 32};

TEST(PassPages, QueueSharedPagesOnceAndThePartThatIsSeen) {
  // Two siblings share page 5; one more run of two tokens has page 1 alone.
  const std::array<int32_t, 2> first{5, 2};
  const std::array<int32_t, 2> second{5, 3};
  const std::array<int32_t, 1> third{1};
  const std::array<const int32_t*, 4> pages{
      first.data(), second.data(), third.data(), third.data()};
  const std::array<int32_t, 4> visible{66, 128, 63, 64};
  const std::array<PageWrite, 3> writes{PageWrite{0, 1}, PageWrite{1, 1}, PageWrite{2, 2}};
  const PassRows rows{.num_tokens = 4,
                      .pages = pages.data(),
                      .visible = visible.data(),
                      .writes = writes.data(),
                      .num_writes = 3};
  const int64_t tile = tile_elements(kShape.head_dim);
  const std::vector<uint16_t> tiles(6 * kShape.num_kv_heads * tile);
  const auto at = [&](int64_t page, int64_t head) {
    return reinterpret_cast<const char*>(tiles.data() + (page * kShape.num_kv_heads + head) * tile);
  };
  FetchQueue queue;
  queue.add(tiles.data(), 1);  // of the layer before: dropped
  queue_pages_of(rows, kShape, tiles.data(), 0, 3, queue);
  std::vector<std::pair<const char*, int64_t>> found;
  while (!queue.empty()) {
    const FetchQueue::Range range = queue.take(1 << 20);
    found.emplace_back(range.at, range.bytes);
  }
  const int64_t page = 2 * kShape.num_kv_heads * tile;
  const int64_t part = 2 * (kTileTokens + 2) * kShape.head_dim;
  const std::vector<std::pair<const char*, int64_t>> wanted{
      {at(5, 0), page}, {at(2, 0), part}, {at(2, 1), part}, {at(3, 0), page}, {at(1, 0), page}};
  EXPECT_EQ(found, wanted);
}

TEST(PassPages, FetchingThemChangesNoProduct) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int64_t rows : {1, 16, 64}) {
    constexpr int64_t kDepth = 96;
    std::vector<BFloat16> a(round_up(rows, kRowStep) * kDepth);
    std::vector<BFloat16> b(packed_size(kDepth, kPanel));
    for (BFloat16& v : a) v = normal(random);
    for (BFloat16& v : b) v = normal(random);
    const RowTile tile{a.data(), kDepth, round_up(rows, row_step())};
    std::vector<float> plain(kRowTile * kPanel);
    std::vector<float> fetching(plain.size());
    gemm_tile(tile, b.data(), kDepth, kPanel, /*add=*/false, plain.data(), kPanel);
    for (const int64_t ahead : {0, 4096}) {
      FetchQueue queue;
      queue.add(plain.data(), 5000);
      queue.add(b.data(), 64);
      gemm_tile(tile,
                b.data(),
                kDepth,
                kPanel,
                /*add=*/false,
                fetching.data(),
                kPanel,
                {.at = ahead == 0 ? nullptr : b.data(), .bytes = ahead, .then = &queue});
      EXPECT_EQ(plain, fetching) << rows << " rows, " << ahead << " bytes ahead";
      // With as many rows the product lasts until all has been fetched.
      EXPECT_TRUE(queue.empty() || rows < 64 || !has_register_tiles()) << ahead << " bytes ahead";
    }
  }
}

}  // namespace
}  // namespace banyan::kernels
