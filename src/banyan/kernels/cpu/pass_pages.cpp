// The pages of the last token of every write, which are those of all its tokens.
#include "banyan/kernels/cpu/pass_pages.h"

#include <algorithm>

namespace banyan::kernels {
namespace {

constexpr int64_t kMostBytes = 8 << 20;

}  // namespace

void queue_pages_of(const PassRows& rows,
                    const AttentionShape& shape,
                    const uint16_t* tiles,
                    int64_t begin,
                    int64_t end,
                    FetchQueue& queue) {
  const int64_t tile = tile_elements(shape.head_dim);
  const int64_t page_elements = shape.num_kv_heads * tile;
  const auto bytes_of = [](int64_t elements) {
    return elements * static_cast<int64_t>(sizeof(uint16_t));
  };
  queue.clear();
  int64_t left = kMostBytes / bytes_of(page_elements);  // pages
  const int32_t* past = nullptr;                        // pages of the write before
  int64_t num_past = 0;
  for (int64_t w = begin; w < end && left > 0; ++w) {
    const int64_t token = rows.writes[w].first + rows.writes[w].count - 1;
    const int32_t* pages = rows.pages[token];
    const int64_t num_pages = divide_up(rows.visible[token], kTileTokens);
    for (int64_t j = 0; j < num_pages && left > 0; ++j) {
      if (j < num_past && past[j] == pages[j]) continue;
      const uint16_t* page = tiles + pages[j] * page_elements;
      const int64_t seen = std::min<int64_t>(kTileTokens, rows.visible[token] - j * kTileTokens);
      if (seen == kTileTokens) {
        queue.add(page, bytes_of(page_elements));
      } else {  // all keys, and the values of the positions that are seen
        const int64_t elements = (kTileTokens + round_up(seen, 2)) * shape.head_dim;
        for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
          queue.add(page + head * tile, bytes_of(elements));
        }
      }
      --left;
    }
    past = pages;
    num_past = num_pages;
  }
}

}  // namespace banyan::kernels
