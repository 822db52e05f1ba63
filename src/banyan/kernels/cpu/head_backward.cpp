// Backward of the head. Per chunk of kRowChunk rows and kVocabChunk tokens, in ascending order:
//   1. per tile, logits are recomputed (or kept probabilities are read) and turned into dz, which
//   is
//      rounded to bf16 and stored by row and by token
//   2. dW[chunk] += dzᵀ H      (H packed over its rows once per row chunk)
//   3. dH += dz W[chunk]       (fp32, rounded after the last vocabulary chunk)
// Every output tile has one writer in each phase, so threads do not change the order of a sum.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "banyan/kernels/cpu/head.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

constexpr int64_t kRowChunk = 1024;
constexpr int64_t kVocabChunk = 8 * kVocabTile;
constexpr int64_t kPad = 32;  // keeps row strides off powers of two

// dz of a row = p (a + b (log p + H)) + (one-hot terms), a = -G / tau, b = -grad_entropy / tau.
struct RowGradient {
  float lse = 0.0f;
  float a = 0.0f;
  float b = 0.0f;
  float entropy = 0.0f;
};

// Logits z -> dz without the one-hot terms, in place.
BANYAN_MULTIVERSION
void softmax_gradient(float* z,
                      int64_t columns,
                      float inverse_temperature,
                      const RowGradient& row) {
  const auto [lse, a, b, entropy] = row;  // copies: z might alias it otherwise
  if (b == 0.0f) {
    for (int64_t j = 0; j < columns; ++j) {
      z[j] = a * exp_f32(fma(z[j], inverse_temperature, -lse));
    }
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    const float log_p = fma(z[j], inverse_temperature, -lse);
    const float finite = log_p < -88.0f ? -88.0f : log_p;
    z[j] = exp_f32(log_p) * fma(b, finite + entropy, a);
  }
}

// The same from kept probabilities: e^(s - m) e^(m - lse).
BANYAN_MULTIVERSION
void kept_gradient(const uint16_t* kept,
                   const float* kept_max,
                   int64_t columns,
                   const RowGradient& row,
                   float* z) {
  const auto [lse, a, b, entropy] = row;
  alignas(64) float factor[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) factor[l] = a * exp_f32(kept_max[l] - lse);
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) z[j + l] = bf16_to_f32(kept[j + l]) * factor[l];
  }
  for (int64_t l = 0; j + l < columns; ++l) z[j + l] = bf16_to_f32(kept[j + l]) * factor[l];
}

// Working memory of one row chunk, shared by the threads.
struct Chunk {
  int64_t first = 0;
  int64_t rows = 0;
  int64_t padded_rows = 0;     // multiple of kRowTile
  BFloat16* hidden = nullptr;  // packed over rows: panels of E, panel_stride(padded_rows) apart
  BFloat16* dz = nullptr;      // [padded_rows, kVocabChunk + kPad]
  BFloat16* dz_t = nullptr;    // a tile of the vocabulary after the other, transposed and packed
  float* dh = nullptr;         // [padded_rows, round_up(E, kPanel)]

  int64_t ld_dz() const { return kVocabChunk + kPad; }
  int64_t ld_dz_t() const { return padded_rows + kPad; }
  int64_t tile_size() const { return packed_rows_offset(kVocabTile, ld_dz_t()); }
};

class Backward {
 public:
  Backward(const HeadInput& input, const HeadGradients& gradients);
  void run();

 private:
  void pack_hidden(const Chunk& chunk) const;
  void logit_gradients(const Chunk& chunk, int64_t first_token, int64_t tokens) const;
  void tile_gradient(
      const Chunk& chunk, int64_t row, int64_t first_token, int64_t column, int64_t columns) const;
  void softmax_gradients(
      int64_t first, int64_t rows, int64_t token, int64_t columns, float* z) const;
  void add_to_weight(const Chunk& chunk, int64_t first_token, int64_t tokens) const;
  void add_to_hidden(const Chunk& chunk, int64_t first_token, int64_t tokens) const;
  void store_hidden(const Chunk& chunk) const;

  const HeadInput& in_;
  const HeadGradients& out_;
  int64_t width_;   // E
  int64_t panels_;  // of E
  int64_t vocabulary_;
  std::vector<RowGradient> rows_;
};

Backward::Backward(const HeadInput& input, const HeadGradients& gradients)
    : in_(input),
      out_(gradients),
      width_(input.weight.depth),
      panels_(divide_up(width_, kPanel)),
      vocabulary_(input.weight.columns),
      rows_(input.rows) {
  for (int64_t r = 0; r < in_.rows; ++r) {
    double sum = 0.0;
    if (out_.grad_logprob != nullptr) {
      for (int32_t x = in_.row_offsets[r]; x < in_.row_offsets[r + 1]; ++x)
        sum += out_.grad_logprob[x];
    }
    rows_[r].lse = out_.lse[r];
    rows_[r].a = static_cast<float>(-sum) * in_.inverse_temperature;
    if (out_.grad_entropy != nullptr) {
      rows_[r].b = -out_.grad_entropy[r] * in_.inverse_temperature;
      rows_[r].entropy = out_.entropy[r];
    }
  }
}

void Backward::pack_hidden(const Chunk& chunk) const {
  at::parallel_for(0, chunk.padded_rows / kRowTile, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kRowTile;
    pack_panels(in_.hidden + (chunk.first + first) * in_.ld_hidden,
                in_.ld_hidden,
                std::min(chunk.rows, end * kRowTile) - first,
                width_,
                end * kRowTile - first,
                chunk.hidden,
                panel_stride(chunk.padded_rows),
                first);
  });
}

// dz without the one-hot terms: z [rows, kVocabTile] of rows from `first`, tokens from `token`.
void Backward::softmax_gradients(
    int64_t first, int64_t rows, int64_t token, int64_t columns, float* z) const {
  thread_local Scratch row_scratch;
  const KeptProbabilities& kept = out_.kept;
  if (out_.grad_entropy == nullptr && first + rows <= kept.rows) {
    const int64_t tile = token / kVocabTile;
    for (int64_t r = 0; r < rows; ++r) {
      kept_gradient(kept.values_at(first + r, tile),
                    kept.max_at(first + r, tile),
                    columns,
                    rows_[first + r],
                    z + r * kVocabTile);
    }
    return;
  }
  const RowTile hidden =
      row_tile(in_.hidden + first * in_.ld_hidden, in_.ld_hidden, rows, width_, row_scratch);
  logit_tile(hidden, in_.weight, token, columns, z);
  for (int64_t r = 0; r < rows; ++r) {
    softmax_gradient(z + r * kVocabTile, columns, in_.inverse_temperature, rows_[first + r]);
  }
}

// One tile of dz: rows from `row` of the chunk, tokens from first_token + column.
void Backward::tile_gradient(
    const Chunk& chunk, int64_t row, int64_t first_token, int64_t column, int64_t columns) const {
  alignas(64) float z[kRowTile * kVocabTile];
  const int64_t first = chunk.first + row;
  const int64_t rows = std::min(kRowTile, chunk.rows - row);
  softmax_gradients(first, rows, first_token + column, columns, z);
  for (int64_t r = 0; r < rows && out_.grad_logprob != nullptr; ++r) {
    for (int32_t x = in_.row_offsets[first + r]; x < in_.row_offsets[first + r + 1]; ++x) {
      const int64_t at = in_.token[x] - first_token - column;
      if (at >= 0 && at < columns) {
        z[r * kVocabTile + at] += out_.grad_logprob[x] * in_.inverse_temperature;
      }
    }
  }
  BFloat16* dz = chunk.dz + row * chunk.ld_dz() + column;
  store_bf16(z, kVocabTile, rows, columns, /*bias=*/nullptr, dz, chunk.ld_dz());
  if (columns % 2 != 0) {  // the product over tokens reads pairs
    for (int64_t r = 0; r < rows; ++r) dz[r * chunk.ld_dz() + columns] = BFloat16(0.0f);
  }
  for (int64_t r = rows; r < kRowTile; ++r) {
    std::memset(
        static_cast<void*>(dz + r * chunk.ld_dz()), 0, sizeof(BFloat16) * round_up(columns, 2));
  }
  pack_transposed_rows(dz,
                       chunk.ld_dz(),
                       rows,
                       columns,
                       kRowTile,
                       chunk.dz_t + column / kVocabTile * chunk.tile_size(),
                       chunk.ld_dz_t(),
                       row);
}

void Backward::logit_gradients(const Chunk& chunk, int64_t first_token, int64_t tokens) const {
  const int64_t row_tiles = chunk.padded_rows / kRowTile;
  const int64_t items = row_tiles * divide_up(tokens, kVocabTile);
  for_each_item(items, [&](const auto& next) {
    for (int64_t item = next(); item >= 0; item = next()) {
      const int64_t column = item / row_tiles * kVocabTile;
      const int64_t columns = std::min(kVocabTile, tokens - column);
      tile_gradient(chunk, item % row_tiles * kRowTile, first_token, column, columns);
    }
    gemm_release();
  });
}

void Backward::add_to_weight(const Chunk& chunk, int64_t first_token, int64_t tokens) const {
  constexpr int64_t kBlocks = divide_up(kVocabTile, kPackRows);  // of a tile
  const int64_t tiles = divide_up(tokens, kVocabTile);
  for_each_item(tiles * kBlocks * panels_, [&](const auto& next) {
    for (int64_t item = next(); item >= 0; item = next()) {
      const int64_t tile = item / panels_ / kBlocks;
      const int64_t row = item / panels_ % kBlocks * kPackRows;
      const int64_t token = tile * kVocabTile + row;
      const int64_t column = item % panels_ * kPanel;
      const int64_t left = std::min(kVocabTile - row, tokens - token);
      add_product(chunk.dz_t + tile * chunk.tile_size() + packed_rows_offset(row, chunk.ld_dz_t()),
                  chunk.ld_dz_t(),
                  chunk.hidden + column / kPanel * panel_stride(chunk.padded_rows),
                  chunk.padded_rows,
                  std::min(kPackRows, left),
                  std::min(kPanel, width_ - column),
                  out_.grad_weight + (first_token + token) * width_ + column,
                  width_);
    }
    gemm_release();
  });
}

void Backward::add_to_hidden(const Chunk& chunk, int64_t first_token, int64_t tokens) const {
  const int64_t row_tiles = chunk.padded_rows / kRowTile;
  for_each_item(row_tiles * panels_, [&](const auto& next) {
    for (int64_t item = next(); item >= 0; item = next()) {
      const int64_t row = item / panels_ * kRowTile;
      const int64_t p = item % panels_;
      gemm_tile({chunk.dz + row * chunk.ld_dz(), chunk.ld_dz(), kRowTile},
                out_.weight_t.panel(p) + first_token * kPanel,
                round_up(tokens, 2),
                kPanel,
                /*add=*/first_token > 0,
                chunk.dh + row * panels_ * kPanel + p * kPanel,
                panels_ * kPanel);
    }
    gemm_release();
  });
}

void Backward::store_hidden(const Chunk& chunk) const {
  at::parallel_for(0, chunk.rows, kRowTile, [&](int64_t begin, int64_t end) {
    store_bf16(chunk.dh + begin * panels_ * kPanel,
               panels_ * kPanel,
               end - begin,
               width_,
               /*bias=*/nullptr,
               out_.grad_hidden + (chunk.first + begin) * width_,
               width_);
  });
}

void Backward::run() {
  thread_local Scratch hidden_scratch, dz_scratch, dz_t_scratch, dh_scratch;
  for (int64_t first = 0; first < in_.rows; first += kRowChunk) {
    Chunk chunk;
    chunk.first = first;
    chunk.rows = std::min(kRowChunk, in_.rows - first);
    chunk.padded_rows = round_up(chunk.rows, kRowTile);
    chunk.hidden = hidden_scratch.get<BFloat16>(panels_ * panel_stride(chunk.padded_rows));
    chunk.dz = dz_scratch.get<BFloat16>(chunk.padded_rows * chunk.ld_dz());
    chunk.dz_t = dz_t_scratch.get<BFloat16>(kVocabChunk / kVocabTile * chunk.tile_size());
    chunk.dh = dh_scratch.get<float>(chunk.padded_rows * panels_ * kPanel);
    pack_hidden(chunk);
    for (int64_t token = 0; token < vocabulary_; token += kVocabChunk) {
      const int64_t tokens = std::min(kVocabChunk, vocabulary_ - token);
      logit_gradients(chunk, token, tokens);
      add_to_weight(chunk, token, tokens);
      add_to_hidden(chunk, token, tokens);
    }
    store_hidden(chunk);
  }
}

}  // namespace

void head_backward(const HeadInput& input, const HeadGradients& gradients) {
  Backward(input, gradients).run();
}

}  // namespace banyan::kernels
