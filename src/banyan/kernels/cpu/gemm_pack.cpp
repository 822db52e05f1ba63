// Moves between row-major matrices and the packed layout of gemm.h. All loops write each value
// once; two bf16 of neighbouring depth are handled as one 32-bit word.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {

namespace {

using Words = uint32_t __attribute__((vector_size(64)));
constexpr int64_t kBlock = 16;  // words of one vector

// In-place transpose of a 16 x 16 block of words: four rounds of exchanges over distance 8, 4,
// 2, 1.
template <int kDistance>
BANYAN_INLINE void exchange(Words* rows) {
  Words low_mask, high_mask;
  for (int i = 0; i < kBlock; ++i) {
    const bool low = (i & kDistance) == 0;
    low_mask[i] = low ? i : 16 + i - kDistance;
    high_mask[i] = low ? i + kDistance : 16 + i;
  }
  for (int i = 0; i < kBlock; ++i) {
    if ((i & kDistance) != 0) continue;
    const Words a = rows[i];
    const Words b = rows[i + kDistance];
    rows[i] = __builtin_shuffle(a, b, low_mask);
    rows[i + kDistance] = __builtin_shuffle(a, b, high_mask);
  }
}

BANYAN_INLINE void transpose_block(Words* rows) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// 64 rows of w, all depth -> one panel of Wᵀ. Missing rows and an odd last column become zeros.
BANYAN_MULTIVERSION
void pack_rows(const float* w, int64_t rows, int64_t in, uint32_t* panel) {
  const int64_t pairs = (in + 1) / 2;
  for (int64_t first = 0; first < kPanel; first += kBlock) {
    for (int64_t pair = 0; pair < pairs; pair += kBlock) {
      const int64_t width = pairs - pair < kBlock ? pairs - pair : kBlock;
      Words block[kBlock] = {};
      for (int64_t r = 0; r < kBlock && first + r < rows; ++r) {
        const float* row = w + (first + r) * in + 2 * pair;
        const bool ragged = 2 * (pair + width) > in;
        const int64_t whole = ragged ? width - 1 : width;
        uint32_t words[kBlock] = {};
        if (whole == kBlock) {
          for (int64_t i = 0; i < kBlock; ++i) {
            words[i] = f32_to_bf16(row[2 * i]) | static_cast<uint32_t>(f32_to_bf16(row[2 * i + 1]))
                                                     << 16;
          }
        } else {
          for (int64_t i = 0; i < whole; ++i) {
            words[i] = f32_to_bf16(row[2 * i]) | static_cast<uint32_t>(f32_to_bf16(row[2 * i + 1]))
                                                     << 16;
          }
          if (ragged) words[whole] = f32_to_bf16(row[2 * whole]);
        }
        std::memcpy(&block[r], words, sizeof(words));
      }
      transpose_block(block);
      for (int64_t i = 0; i < width; ++i) {
        std::memcpy(panel + (pair + i) * kPanel + first, &block[i], sizeof(Words));
      }
    }
  }
}

// Columns [0, columns) of w, all rows -> one panel of W.
BANYAN_MULTIVERSION
void pack_columns(const float* w, int64_t ld, int64_t rows, int64_t columns, uint32_t* panel) {
  for (int64_t row = 0; row < rows; row += 2) {
    const float* even = w + row * ld;
    const float* odd = even + ld;
    uint32_t* out = panel + row / 2 * kPanel;
    if (row + 1 < rows) {
      for (int64_t j = 0; j < columns; ++j) {
        out[j] = f32_to_bf16(even[j]) | static_cast<uint32_t>(f32_to_bf16(odd[j])) << 16;
      }
    } else {
      for (int64_t j = 0; j < columns; ++j) out[j] = f32_to_bf16(even[j]);
    }
    for (int64_t j = columns; j < kPanel; ++j) out[j] = 0;
  }
}

// Rows are read through all panels, so that they come in streams.
BANYAN_MULTIVERSION
void interleave_rows(const uint16_t* x,
                     int64_t ld,
                     int64_t rows,
                     int64_t columns,
                     int64_t depth,
                     uint32_t* out,
                     int64_t panel_words) {
  for (int64_t row = 0; row < depth; row += 2) {
    const uint16_t* even = x + row * ld;
    const uint16_t* odd = even + ld;
    uint32_t* to = out + row / 2 * kPanel;
    for (int64_t first = 0; first < columns; first += kPanel, to += panel_words) {
      const int64_t width = columns - first < kPanel ? columns - first : kPanel;
      if (row + 1 < rows) {
        for (int64_t j = 0; j < width; ++j)
          to[j] = even[first + j] | static_cast<uint32_t>(odd[first + j]) << 16;
      } else if (row < rows) {
        for (int64_t j = 0; j < width; ++j) to[j] = even[first + j];
      } else {
        for (int64_t j = 0; j < width; ++j) to[j] = 0;
      }
      for (int64_t j = width; j < kPanel; ++j) to[j] = 0;
    }
  }
}

// 32 rows x 16 columns at a time: rows are paired into words, the block of words is transposed.
BANYAN_MULTIVERSION
void transpose_rows(const uint16_t* x,
                    int64_t ld,
                    int64_t rows,
                    int64_t columns,
                    int64_t depth,
                    uint16_t* out,
                    int64_t ld_out) {
  for (int64_t column = 0; column < columns; column += kBlock) {
    const int64_t width = columns - column < kBlock ? columns - column : kBlock;
    for (int64_t row = 0; row < depth; row += 2 * kBlock) {
      Words block[kBlock] = {};
      for (int64_t r = 0; r < kBlock; ++r) {
        const int64_t at = row + 2 * r;
        const uint16_t* even = x + at * ld + column;
        const uint16_t* odd = even + ld;
        uint32_t words[kBlock] = {};
        if (at + 1 < rows && width == kBlock) {
          for (int64_t j = 0; j < kBlock; ++j)
            words[j] = even[j] | static_cast<uint32_t>(odd[j]) << 16;
        } else {
          for (int64_t j = 0; j < width; ++j) {
            const uint32_t low = at < rows ? even[j] : 0u;
            const uint32_t high = at + 1 < rows ? odd[j] : 0u;
            words[j] = low | high << 16;
          }
        }
        std::memcpy(&block[r], words, sizeof(words));
      }
      transpose_block(block);
      for (int64_t j = 0; j < width; ++j) {
        std::memcpy(out + (column + j) * ld_out + row, &block[j], sizeof(Words));
      }
    }
  }
}

}  // namespace

void pack_weight(const float* w, int64_t out, int64_t in, BFloat16* packed) {
  const int64_t words = round_up(in, 2) / 2 * kPanel;
  at::parallel_for(0, divide_up(out, kPanel), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      pack_rows(w + p * kPanel * in,
                std::min(kPanel, out - p * kPanel),
                in,
                reinterpret_cast<uint32_t*>(packed) + p * words);
    }
  });
}

void pack_weight_transposed(const float* w, int64_t out, int64_t in, BFloat16* packed) {
  const int64_t words = round_up(out, 2) / 2 * kPanel;
  at::parallel_for(0, divide_up(in, kPanel), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      pack_columns(w + p * kPanel,
                   in,
                   out,
                   std::min(kPanel, in - p * kPanel),
                   reinterpret_cast<uint32_t*>(packed) + p * words);
    }
  });
}

void unpack_row(const Panels& weight, int64_t row, BFloat16* values) {
  const BFloat16* at = weight.panel(row / kPanel) + row % kPanel * 2;
  for (int64_t k = 0; k < weight.depth; ++k) values[k] = at[k / 2 * 2 * kPanel + k % 2];
}

void unpack_row_transposed(const Panels& weight_t, int64_t row, BFloat16* values) {
  for (int64_t column = 0; column < weight_t.columns; column += kPanel) {
    const BFloat16* at = weight_t.panel(column / kPanel) + row / 2 * 2 * kPanel + row % 2;
    const int64_t width = std::min(kPanel, weight_t.columns - column);
    for (int64_t j = 0; j < width; ++j) values[column + j] = at[2 * j];
  }
}

void pack_panels(const BFloat16* x,
                 int64_t ld,
                 int64_t rows,
                 int64_t columns,
                 int64_t padded_rows,
                 BFloat16* out,
                 int64_t stride,
                 int64_t first) {
  interleave_rows(reinterpret_cast<const uint16_t*>(x),
                  ld,
                  rows,
                  columns,
                  padded_rows,
                  reinterpret_cast<uint32_t*>(out) + first / 2 * kPanel,
                  stride / 2);
}

void transpose(const BFloat16* x,
               int64_t ld,
               int64_t rows,
               int64_t columns,
               int64_t depth,
               BFloat16* out,
               int64_t ld_out) {
  transpose_rows(reinterpret_cast<const uint16_t*>(x),
                 ld,
                 rows,
                 columns,
                 depth,
                 reinterpret_cast<uint16_t*>(out),
                 ld_out);
}

}  // namespace banyan::kernels
