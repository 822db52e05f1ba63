// Forward of the head: logit tiles are produced and reduced while they are in the cache.
#include "banyan/kernels/cpu/head.h"

#include <algorithm>
#include <array>
#include <vector>

#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

void logit_tile(
    const RowTile& hidden, const Panels& weight, int64_t first, int64_t columns, float* z) {
  const int64_t bytes = weight.padded_depth() * kPanel * static_cast<int64_t>(sizeof(BFloat16));
  for (int64_t column = 0; column < columns; column += kPanel) {
    const int64_t panel = (first + column) / kPanel;
    Ahead ahead;
    if (panel + 1 < weight.count()) ahead = {weight.panel(panel + 1), bytes};
    gemm_tile(hidden,
              weight.panel(panel),
              weight.padded_depth(),
              kPanel,
              /*add=*/false,
              z + column,
              kVocabTile,
              ahead);
  }
}

namespace {

constexpr int64_t kTilesPerGroup = 4;  // row tiles that share one pass over a segment's weights

// The rows [first, first + rows) of one group against one segment: states and chosen logits.
void reduce_segment(const HeadInput& input,
                    int64_t first_row,
                    int64_t last_row,
                    int64_t first_token,
                    int64_t last_token,
                    bool with_entropy,
                    SoftmaxState* states,
                    int64_t state_stride,
                    float* chosen,
                    const KeptProbabilities& kept) {
  thread_local std::array<Scratch, kTilesPerGroup> row_scratch;
  alignas(64) float z[kRowTile * kVocabTile];
  std::array<RowTile, kTilesPerGroup> tiles;
  std::array<LaneState, kTilesPerGroup * kRowTile> lanes;
  for (int64_t row = first_row, i = 0; row < last_row; row += kRowTile, ++i) {
    tiles[i] = row_tile(input.hidden + row * input.ld_hidden,
                        input.ld_hidden,
                        std::min(kRowTile, last_row - row),
                        input.weight.depth,
                        row_scratch[i]);
  }
  for (int64_t v = first_token; v < last_token; v += kVocabTile) {
    const int64_t columns = std::min(kVocabTile, last_token - v);
    for (int64_t row = first_row, i = 0; row < last_row; row += kRowTile, ++i) {
      const int64_t rows = std::min(kRowTile, last_row - row);
      logit_tile(tiles[i], input.weight, v, columns, z);
      reduce_tile(z,
                  kVocabTile,
                  rows,
                  columns,
                  input.inverse_temperature,
                  with_entropy,
                  &lanes[i * kRowTile],
                  kept,
                  row,
                  v / kVocabTile);
      for (int64_t r = 0; r < rows; ++r) {
        for (int32_t x = input.row_offsets[row + r]; x < input.row_offsets[row + r + 1]; ++x) {
          const int64_t column = input.token[x] - v;
          if (column >= 0 && column < columns) {
            chosen[x] = z[r * kVocabTile + column] * input.inverse_temperature;
          }
        }
      }
    }
  }
  for (int64_t row = first_row; row < last_row; ++row) {
    states[row * state_stride] = collapse(lanes[row - first_row]);
  }
}

}  // namespace

void head_forward(const HeadInput& input,
                  float* logprob,
                  float* lse,
                  float* entropies,
                  const KeptProbabilities& kept) {
  if (input.rows == 0) return;
  const int64_t vocabulary = input.weight.columns;
  const int64_t segments = divide_up(vocabulary, kVocabSegment);
  const int64_t group = (input.rows >= 8 * kRowTile ? kTilesPerGroup : 1) * kRowTile;
  const int64_t groups = divide_up(input.rows, group);
  const bool with_entropy = entropies != nullptr;
  std::vector<SoftmaxState> states(input.rows * segments);
  for_each_item(segments * groups, [&](const auto& next) {
    for (int64_t item = next(); item >= 0; item = next()) {
      const int64_t segment = item / groups;
      const int64_t row = item % groups * group;
      reduce_segment(input,
                     row,
                     std::min(input.rows, row + group),
                     segment * kVocabSegment,
                     std::min(vocabulary, (segment + 1) * kVocabSegment),
                     with_entropy,
                     states.data() + segment,
                     segments,
                     logprob,
                     kept);
    }
    gemm_release();
  });
  for (int64_t row = 0; row < input.rows; ++row) {
    SoftmaxState whole;
    for (int64_t s = 0; s < segments; ++s) merge(whole, states[row * segments + s]);
    const double log_sum = log_sum_exp(whole);
    lse[row] = static_cast<float>(log_sum);
    if (with_entropy) entropies[row] = static_cast<float>(entropy(whole));
    for (int32_t x = input.row_offsets[row]; x < input.row_offsets[row + 1]; ++x) {
      logprob[x] = static_cast<float>(logprob[x] - log_sum);  // logprob held the chosen logit
    }
  }
}

}  // namespace banyan::kernels
