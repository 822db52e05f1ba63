// Attention backward over one packed trie; formulas in the header.
//
// As many kv heads at a time as kPacksBytes allows: first keys and queries are packed in the forms
// that the products want, then the runs of key chunks, each of all these heads in turn, are one
// list of work items. Forms of a chunk are `width` = round_up(size, 16) keys wide, zero beyond its
// keys; forms of a tile have 64 rows, zero beyond its queries. Products over the part of a tile
// that lies in the chunk's subtree read copies filled up with zeros, so that nothing of another
// path gets in, not even a NaN.
#include "banyan/kernels/cpu/attention_backward.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "banyan/kernels/cpu/attention_gradient_scores.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/turns.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

constexpr int64_t kTile = kTileTokens;
constexpr int64_t kPacksBytes = int64_t{32} << 20;  // more than one kv head only within it

// The packed operands of one kv head and the query heads of its group. A chunk's part of a key
// array starts at offset * D. Query arrays hold [tile][head of the group][64][D], one row step
// longer, since a product's last rows may lie beyond.
struct Packs {
  uint16_t* key_columns;    // [D / 2][width][2]
  uint16_t* key_pairs;      // [width / 2][D][2]
  uint16_t* value_columns;  // [D / 2][width][2]
  uint16_t* query_rows;     // [64][D]
  uint16_t* grad_rows;      // [64][D]: dO
  uint16_t* query_t;        // [D][64]
  uint16_t* grad_t;         // [D][64]
  float* lse;               // [64]
  float* delta;             // [64]
  float* dq;                // [64][D]: the sums so far
};

struct Sizes {
  int64_t keys = 0;   // of the packed arrays, every chunk rounded up
  int64_t tiles = 0;  // times the heads of the group
};

Packs carve_packs(Carver& carver, const Sizes& sizes, int64_t dim) {
  const int64_t rows = sizes.tiles * kTile + kRowStep;
  Packs packs{};
  packs.key_columns = carver.take<uint16_t>(sizes.keys * dim);
  packs.key_pairs = carver.take<uint16_t>(sizes.keys * dim);
  packs.value_columns = carver.take<uint16_t>(sizes.keys * dim);
  packs.query_rows = carver.take<uint16_t>(rows * dim);
  packs.grad_rows = carver.take<uint16_t>(rows * dim);
  packs.query_t = carver.take<uint16_t>(rows * dim);
  packs.grad_t = carver.take<uint16_t>(rows * dim);
  packs.lse = carver.take<float>(rows);
  packs.delta = carver.take<float>(rows);
  packs.dq = carver.take<float>(rows * dim);
  return packs;
}

struct Local {
  float* scores;         // [64, 64]
  float* grad_probs;     // [64, 64]
  uint32_t* prob_pairs;  // [32][64]
  uint32_t* grad_pairs;  // [32][64]
  uint16_t* grad_rows;   // [64, 64]: dS
  uint16_t* left_t;      // [D, 64]: part of a tile
  float* dk_t;           // [D, 64] of each chunk of a run
  float* dv_t;           // [D, 64] of each chunk of a run
  float* row;            // [D]
  float* dq;             // [64, D]: of part of a tile
};

Local carve_local(Carver& carver, int64_t dim) {
  Local local{};
  local.scores = carver.take<float>(kTile * kTile);
  local.grad_probs = carver.take<float>(kTile * kTile);
  local.prob_pairs = carver.take<uint32_t>(kTile / 2 * kTile);
  local.grad_pairs = carver.take<uint32_t>(kTile / 2 * kTile);
  local.grad_rows = carver.take<uint16_t>(kTile * kTile);
  local.left_t = carver.take<uint16_t>(dim * kTile);
  local.dk_t = carver.take<float>(kRunChunks * dim * kTile);
  local.dv_t = carver.take<float>(kRunChunks * dim * kTile);
  local.row = carver.take<float>(dim);
  local.dq = carver.take<float>(kTile * dim);
  return local;
}

class Backward {
 public:
  Backward(const AttendBackwardInput& input,
           const AttendGradients& gradients,
           const Packs& packs,
           Turns& turns,
           int64_t kv_head)
      : in_(input),
        grads_(gradients),
        packs_(packs),
        turns_(turns),
        kv_head_(kv_head),
        heads_(input.shape.num_heads),
        kv_heads_(input.shape.num_kv_heads),
        dim_(input.shape.head_dim),
        group_(input.shape.group()),
        queries_(input.num_queries()) {}

  void pack_keys(int64_t index) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t n = size(chunk);
    const int64_t at = chunk.offset * dim_;
    const uint16_t* rows[kTile];
    for (int64_t i = 0; i < n; ++i) rows[i] = in_.k[chunk.begin + i] + kv_head_ * dim_;
    pack_columns(rows, n, width(chunk), dim_, packs_.key_columns + at);
    pack_pairs(rows, n, width(chunk), dim_, packs_.key_pairs + at);
    for (int64_t i = 0; i < n; ++i) rows[i] = in_.v[chunk.begin + i] + kv_head_ * dim_;
    pack_columns(rows, n, width(chunk), dim_, packs_.value_columns + at);
  }

  void pack_queries(int64_t tile) const {
    const int64_t first = tile * kTile;
    const int64_t n = std::min(kTile, queries_ - first);
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = kv_head_ * group_ + g;
      const int64_t at = query_row(tile, g);
      pack_rows(in_.q + first * in_.q_stride + head * dim_,
                in_.q_stride,
                n,
                packs_.query_rows + at * dim_,
                packs_.query_t + at * dim_);
      pack_rows(in_.grad_out + (first * heads_ + head) * dim_,
                heads_ * dim_,
                n,
                packs_.grad_rows + at * dim_,
                packs_.grad_t + at * dim_);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t from = (first + i) * heads_ + head;
        packs_.lse[at + i] = in_.lse[from];
        packs_.delta[at + i] = row_dot(dim_, in_.grad_out + from * dim_, in_.out + from * dim_);
      }
    }
    std::fill_n(packs_.dq + query_row(tile, 0) * dim_, group_ * kTile * dim_, 0.0f);
    turns_.reset(tile);
  }

  // One run with all queries of its subtree.
  void run(int64_t index, const Local& local) const {
    const ChunkRun& run = in_.runs[index];
    std::fill_n(local.dk_t, kRunChunks * dim_ * kTile, 0.0f);
    std::fill_n(local.dv_t, kRunChunks * dim_ * kTile, 0.0f);
    for (int64_t tile = run.first_tile; tile < run.last_tile; ++tile) {
      const int32_t turn = in_.turns[run.turns + tile - run.first_tile];
      bool waited = false;
      for (int64_t g = 0; g < group_; ++g) {
        for (int64_t i = run.first_chunk; i < run.last_chunk; ++i) {
          const TrieChunk& chunk = in_.chunks[i];
          const Part part = part_of(chunk, tile);
          if (part.rows <= 0) break;  // the tile ends before this chunk
          const int64_t at = (i - run.first_chunk) * dim_ * kTile;
          key_gradients(chunk, part, query_row(tile, g), local, local.dk_t + at, local.dv_t + at);
          if (!waited) turns_.wait(tile, turn);
          waited = true;
          query_gradients(chunk, part, query_row(tile, g), local);
        }
      }
      if (turn + 1 == in_.tile_turns[tile]) store_queries(tile);
      turns_.pass(tile, turn);
    }
    for (int64_t i = run.first_chunk; i < run.last_chunk; ++i) {
      const int64_t at = (i - run.first_chunk) * dim_ * kTile;
      store_keys(local.dk_t + at, in_.shape.scale, i, grads_.dk, grads_.dk_sums, local.row);
      store_keys(local.dv_t + at, 1.0f, i, grads_.dv, grads_.dv_sums, local.row);
    }
  }

 private:
  // The rows of a tile that lie in a chunk's subtree.
  struct Part {
    int64_t begin = 0;  // row of the tile
    int64_t rows = 0;
    int64_t padded = 0;      // rows of the products
    int64_t first_seen = 0;  // keys that the first row sees, if there are as many
    bool whole = false;      // all rows of the tile, 64 in the products
  };

  Part part_of(const TrieChunk& chunk, int64_t tile) const {
    const int64_t tile_begin = in_.num_carried + tile * kTile;
    const int64_t tile_end = in_.num_carried + std::min(queries_, (tile + 1) * kTile);
    const int64_t begin = std::max<int64_t>(tile_begin, chunk.begin);
    const int64_t end = std::min<int64_t>(tile_end, chunk.subtree_end);
    Part part;
    part.begin = begin - tile_begin;
    part.rows = end - begin;
    part.padded = round_up(part.rows, row_multiple_);
    part.first_seen = begin - chunk.begin + 1;
    part.whole = part.rows == tile_end - tile_begin && part.padded == kTile;
    return part;
  }

  // P and dS of one head, and their part of dK and dV.
  void key_gradients(const TrieChunk& chunk,
                     const Part& part,
                     int64_t tile_row,
                     const Local& local,
                     float* dk_t,
                     float* dv_t) const {
    const int64_t w = width(chunk);
    const int64_t row = tile_row + part.begin;
    const int64_t keys = chunk.offset * dim_;
    tile_gemm(part.padded,
              w,
              dim_,
              /*accumulate=*/false,
              packs_.query_rows + row * dim_,
              packs_.key_columns + keys,
              local.scores);
    tile_gemm(part.padded,
              w,
              dim_,
              /*accumulate=*/false,
              packs_.grad_rows + row * dim_,
              packs_.value_columns + keys,
              local.grad_probs);
    gradient_scores({.rows = part.rows,
                     .padded_rows = part.padded,
                     .keys = w,
                     .valid = size(chunk),
                     .first_seen = part.first_seen,
                     .scale = in_.shape.scale,
                     .scores = local.scores,
                     .grad_probs = local.grad_probs,
                     .lse = packs_.lse + row,
                     .delta = packs_.delta + row},
                    local.prob_pairs,
                    local.grad_pairs,
                    local.grad_rows);
    const auto add = [&](const uint16_t* tile_t, const uint32_t* pairs, float* sums) {
      tile_gemm(dim_,
                w,
                part.padded,
                /*accumulate=*/true,
                columns_of(tile_t + tile_row * dim_, part, local.left_t),
                reinterpret_cast<const uint16_t*>(pairs),
                sums);
    };
    add(packs_.grad_t, local.prob_pairs, dv_t);
    add(packs_.query_t, local.grad_pairs, dk_t);
  }

  // dQ of one head += dS K, at the chunk's turn.
  void query_gradients(const TrieChunk& chunk,
                       const Part& part,
                       int64_t tile_row,
                       const Local& local) const {
    float* sums = packs_.dq + (tile_row + part.begin) * dim_;
    tile_gemm(part.padded,
              dim_,
              width(chunk),
              /*accumulate=*/part.whole,
              local.grad_rows,
              packs_.key_pairs + chunk.offset * dim_,
              part.whole ? sums : local.dq);
    if (!part.whole) add_values(part.rows * dim_, local.dq, sums);
  }

  static int64_t size(const TrieChunk& chunk) { return chunk.end - chunk.begin; }
  static int64_t width(const TrieChunk& chunk) { return round_up(size(chunk), kRowStep); }

  // Row of head g of the group in the query arrays.
  int64_t query_row(int64_t tile, int64_t g) const { return (tile * group_ + g) * kTile; }

  // n rows [D] at distance `stride` -> [64][D] and [D][64], zeros beyond.
  void pack_rows(
      const uint16_t* x, int64_t stride, int64_t n, uint16_t* rows, uint16_t* rows_t) const {
    const size_t bytes = static_cast<size_t>(dim_) * sizeof(uint16_t);
    for (int64_t i = 0; i < n; ++i) std::memcpy(rows + i * dim_, x + i * stride, bytes);
    std::memset(rows + n * dim_, 0, static_cast<size_t>(kTile - n) * bytes);
    transpose(reinterpret_cast<const BFloat16*>(rows),
              dim_,
              kTile,
              dim_,
              kTile,
              reinterpret_cast<BFloat16*>(rows_t),
              kTile);
  }

  // The columns of a tile [D][64] that a product over `part.padded` rows reads.
  const uint16_t* columns_of(const uint16_t* tile_t, const Part& part, uint16_t* copy) const {
    if (part.whole) return tile_t;
    for (int64_t d = 0; d < dim_; ++d) {
      uint16_t* to = copy + d * part.padded;
      std::copy_n(tile_t + d * kTile + part.begin, part.rows, to);
      std::fill_n(to + part.rows, part.padded - part.rows, uint16_t{0});
    }
    return copy;
  }

  void store_queries(int64_t tile) const {
    const int64_t first = tile * kTile;
    for (int64_t g = 0; g < group_; ++g) {
      const float* sums = packs_.dq + query_row(tile, g) * dim_;
      for (int64_t i = 0; i < std::min(kTile, queries_ - first); ++i) {
        uint16_t* dq = grads_.dq + ((first + i) * heads_ + kv_head_ * group_ + g) * dim_;
        round_scaled(dim_, in_.shape.scale, sums + i * dim_, dq);
      }
    }
  }

  // sums_t [D, width] to the rows of the chunk's keys.
  void store_keys(const float* sums_t,
                  float scale,
                  int64_t index,
                  uint16_t* out,
                  float* const* sums,
                  float* row) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t at = kv_head_ * dim_;
    for (int64_t i = 0; i < size(chunk); ++i) {
      for (int64_t d = 0; d < dim_; ++d) row[d] = sums_t[d * width(chunk) + i];
      float* sum = sums == nullptr ? nullptr : sums[chunk.begin + i];
      if (index < in_.first_own) {
        add_scaled(dim_, scale, row, sum + at);
        continue;
      }
      uint16_t* to = out + (chunk.begin - in_.num_carried + i) * kv_heads_ * dim_ + at;
      if (sum == nullptr) {
        round_scaled(dim_, scale, row, to);
      } else {
        round_scaled_sums(dim_, scale, row, sum + at, to);
      }
    }
  }

  const AttendBackwardInput& in_;
  const AttendGradients& grads_;
  const Packs& packs_;
  Turns& turns_;
  int64_t kv_head_;
  int64_t heads_;
  int64_t kv_heads_;
  int64_t dim_;
  int64_t group_;
  int64_t queries_;
  int64_t row_multiple_ = std::max<int64_t>(row_step(), 2);  // pairs of rows are products' depth
};

}  // namespace

void attend_backward(const AttendBackwardInput& input,
                     const AttendGradients& gradients,
                     Scratch& packs_memory) {
  if (input.num_tiles == 0) return;
  const AttentionShape& shape = input.shape;
  const TrieChunk& last = input.chunks[input.num_chunks - 1];
  const Sizes sizes{.keys = last.offset + round_up(last.end - last.begin, kRowStep),
                    .tiles = input.num_tiles * shape.group()};
  Carver count(nullptr);
  carve_packs(count, sizes, shape.head_dim);
  Carver local_count(nullptr);
  carve_local(local_count, shape.head_dim);
  const int64_t most = std::clamp<int64_t>(kPacksBytes / count.used(), 1, shape.num_kv_heads);
  std::byte* memory = packs_memory.get<std::byte>(most * count.used());

  for (int64_t first = 0; first < shape.num_kv_heads; first += most) {
    const int64_t heads = std::min(most, shape.num_kv_heads - first);
    std::vector<Packs> packs;
    std::vector<Turns> turns;
    for (int64_t h = 0; h < heads; ++h) {
      Carver carver(memory + h * count.used());
      packs.push_back(carve_packs(carver, sizes, shape.head_dim));
      turns.emplace_back(input.num_tiles);
    }
    const auto backward = [&](int64_t item) {
      const int64_t h = item % heads;
      return Backward(input, gradients, packs[h], turns[h], first + h);
    };
    for_each_item(heads * (input.num_chunks + input.num_tiles), [&](const auto& next) {
      for (int64_t item = next(); item >= 0; item = next()) {
        const int64_t part = item / heads;
        if (part < input.num_chunks) {
          backward(item).pack_keys(part);
        } else {
          backward(item).pack_queries(part - input.num_chunks);
        }
      }
    });
    for_each_item(heads * input.num_runs, [&](const auto& next) {
      static thread_local Scratch scratch;
      Carver carver(scratch.get<std::byte>(local_count.used()));
      const Local local = carve_local(carver, shape.head_dim);
      for (int64_t item = next(); item >= 0; item = next()) {
        backward(item).run(item / heads, local);
      }
      gemm_release();
    });
  }
}

}  // namespace banyan::kernels
