// One phase of a team: the product of some rows with a packed weight, tile by tile, each tile
// handed to a function that stores it.
//
// An item is a group of rows that stays in the second-level cache times a panel of columns, or a
// panel of each of several parts of the weight (gate and up). Panels that are left over after an
// equal share for each member are cut in two. While an item is computed the next one's panels are
// fetched; a member's last item fetches `next`, what the following product starts with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/team.h"

namespace banyan::kernels {

struct TeamGemm {
  const BFloat16* a = nullptr;  // [rows, depth]: row_step() - 1 rows more, and one column more if
  int64_t lda = 0;              // the depth is odd, may be read; that column is zero
  int64_t rows = 0;
  Panels weight;
  Panels next;                 // of the following product, or empty
  FetchQueue* then = nullptr;  // of the member: what it reads after that; or null
};

// What one member computes of a TeamGemm, and in what pieces.
class TeamItems {
 public:
  TeamItems(const TeamGemm& gemm, int64_t parts, int64_t members)
      : rows_(gemm.rows), panels_(gemm.weight.count() / parts) {
    group_ = rows_per_group(gemm.weight.depth);
    groups_ = divide_up(rows_, group_);
    whole_ = groups_ > 1 ? panels_ : panels_ - panels_ % members;
    units_ = whole_ + 2 * (panels_ - whole_);
  }

  int64_t count() const { return groups_ * units_; }
  int64_t first_row(int64_t item) const { return item / units_ * group_; }
  int64_t last_row(int64_t item) const { return std::min(rows_, first_row(item) + group_); }
  // First column of the item, inside a part, and how many.
  int64_t column(int64_t item) const {
    const int64_t unit = item % units_;
    return unit < whole_ ? unit * kPanel : whole_ * kPanel + (unit - whole_) * (kPanel / 2);
  }
  int64_t width(int64_t item) const { return item % units_ < whole_ ? kPanel : kPanel / 2; }

 private:
  static int64_t rows_per_group(int64_t depth) {
    constexpr int64_t kBytes = 384 << 10;
    const int64_t rows = kBytes / (2 * std::max<int64_t>(depth, 1));
    return std::clamp<int64_t>(rows / kRowTile * kRowTile, kRowTile, 4 * kRowTile);
  }

  int64_t rows_;
  int64_t panels_;
  int64_t group_;
  int64_t groups_;
  int64_t whole_;  // panels computed in one piece
  int64_t units_;  // pieces of a row group
};

// Calls store(tiles, row, rows, column, columns) for every tile: tiles [kParts][kRowTile, kPanel],
// column inside a part. With kParts > 1 the parts have equally many columns, a multiple of kPanel.
template <int64_t kParts, typename Store>
void team_gemm(const Team::Member& member,
               Tickets& tickets,
               const TeamGemm& gemm,
               const Store& store) {
  const TeamItems items(gemm, kParts, member.size());
  const Panels& weight = gemm.weight;
  const int64_t part_columns = weight.columns / kParts;
  const int64_t panel_bytes =
      weight.padded_depth() * kPanel * static_cast<int64_t>(sizeof(BFloat16));
  alignas(64) float tiles[kParts][kRowTile * kPanel];
  const auto at = [&](int64_t part, int64_t column) {
    return weight.panel((part * part_columns + column) / kPanel) + column % kPanel * 2;
  };
  for (int64_t item = member.rank(); item < items.count();) {
    const int64_t following = tickets.next(member);
    const int64_t column = items.column(item);
    const int64_t width = items.width(item);
    const int64_t first = items.first_row(item);
    const int64_t last = items.last_row(item);
    // A panel is fetched once; an item of the same panel finds it there.
    const bool fetch =
        following >= items.count() || items.column(following) / kPanel != column / kPanel;
    const int64_t row_tiles = divide_up(last - first, kRowTile);
    for (int64_t row = first; row < last; row += kRowTile) {
      const int64_t n = std::min(kRowTile, last - row);
      const RowTile rows{gemm.a + row * gemm.lda, gemm.lda, round_up(n, row_step())};
      for (int64_t part = 0; part < kParts; ++part) {
        Ahead ahead{.then = gemm.then};
        if (fetch && following < items.count()) {
          ahead.bytes = divide_up(panel_bytes, row_tiles);
          ahead.at =
              reinterpret_cast<const char*>(at(part, items.column(following) / kPanel * kPanel)) +
              (row - first) / kRowTile * ahead.bytes;
        } else if (fetch && part == 0 && row == first && member.rank() < gemm.next.count()) {
          ahead.bytes = gemm.next.padded_depth() * kPanel * static_cast<int64_t>(sizeof(BFloat16));
          ahead.at = gemm.next.panel(member.rank());
        }
        gemm_tile(rows,
                  at(part, column),
                  weight.padded_depth(),
                  width,
                  false,
                  tiles[part],
                  kPanel,
                  ahead);
      }
      store(tiles, row, n, column, std::min(width, part_columns - column));
    }
    item = following;
  }
}

}  // namespace banyan::kernels
