// Attention backward over one packed trie; formulas in the header.
//
// As many kv heads at a time as kSumsBytes allows: first delta of every row, then the runs of key
// chunks, each of all these heads in turn, as one list of work items. A run packs its keys once and
// every tile of queries as it comes to it: of a tile only the rows of its subtree, so that nothing
// of another path gets in, not even a NaN.
#include "banyan/kernels/cpu/attention_backward.h"

#include <algorithm>
#include <vector>

#include "banyan/kernels/cpu/attention_gradient_scores.h"
#include "banyan/kernels/cpu/attention_gradient_tile.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/turns.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

constexpr int64_t kTile = kTileTokens;
constexpr int64_t kLineElements = 32;              // bf16 in a cache line
constexpr int64_t kSumsBytes = int64_t{32} << 20;  // more than one kv head only within it

// What the query heads of one kv head keep: [group][T - C], one row step longer.
struct RowSums {
  float* lse;
  float* delta;
  float* dq;  // [group][T - C][D]: the sums so far
};

RowSums carve_sums(Carver& carver, int64_t rows, int64_t dim) {
  RowSums sums{};
  sums.lse = carver.take<float>(rows + kRowStep);
  sums.delta = carver.take<float>(rows + kRowStep);
  sums.dq = carver.take<float>(rows * dim);
  return sums;
}

// A thread's. Arrays of a chunk hold 64 tokens; there is one for each of a run.
struct Local {
  uint16_t* key_columns;    // [D / 2][width][2]
  uint16_t* key_pairs;      // [width / 2][D][2]
  uint16_t* value_columns;  // [D / 2][width][2]
  float* dk;                // [width, D]
  float* dv;                // [width, D]
  uint16_t* q_pairs;        // of one tile and head
  uint16_t* grad_pairs;
  GradientScratch scratch;
};

Local carve_local(Carver& carver, int64_t dim) {
  Local local{};
  local.key_columns = carver.take<uint16_t>(kRunChunks * kTile * dim);
  local.key_pairs = carver.take<uint16_t>(kRunChunks * kTile * dim);
  local.value_columns = carver.take<uint16_t>(kRunChunks * kTile * dim);
  local.dk = carver.take<float>(kRunChunks * kTile * dim);
  local.dv = carver.take<float>(kRunChunks * kTile * dim);
  local.q_pairs = carver.take<uint16_t>(kTile * dim);
  local.grad_pairs = carver.take<uint16_t>(kTile * dim);
  local.scratch = carve_gradient_scratch(carver, dim);
  return local;
}

class Backward {
 public:
  Backward(const AttendBackwardInput& input,
           const AttendGradients& gradients,
           const RowSums& sums,
           Turns& turns,
           int64_t kv_head)
      : in_(input),
        grads_(gradients),
        sums_(sums),
        turns_(turns),
        kv_head_(kv_head),
        heads_(input.shape.num_heads),
        kv_heads_(input.shape.num_kv_heads),
        dim_(input.shape.head_dim),
        group_(input.shape.group()),
        queries_(input.num_queries()) {}

  // One run with all queries of its subtree.
  void run(int64_t index, const Local& local) const {
    const ChunkRun& run = in_.runs[index];
    fetch_keys(run);
    for (int64_t i = run.first_chunk; i < run.last_chunk; ++i) {
      pack_keys(in_.chunks[i], (i - run.first_chunk) * kTile * dim_, local);
    }
    for (int64_t tile = run.first_tile; tile < run.last_tile; ++tile) {
      const int32_t turn = in_.turns[run.turns + tile - run.first_tile];
      bool waited = false;
      for (int64_t g = 0; g < group_; ++g) {
        const Part part = part_of(in_.chunks[run.first_chunk], tile);
        GradientTile work = pack_queries(part, g, local);
        if (g + 1 < group_) {
          fetch_queries(part, g + 1);
        } else if (tile + 1 < run.last_tile) {
          fetch_queries(part_of(in_.chunks[run.first_chunk], tile + 1), 0);
        }
        float* dq = sums_.dq + (g * queries_ + part.begin) * dim_;
        // The first to add to a tile finds nothing there.
        bool add = turn > 0;
        if (turn == 0 && part.rows < in_.tile_begins[tile + 1] - in_.tile_begins[tile]) {
          clear(tile, g);
          add = true;
        }
        for (int64_t i = run.first_chunk; i < run.last_chunk; ++i) {
          const TrieChunk& chunk = in_.chunks[i];
          if (in_.num_carried + in_.tile_begins[tile + 1] <= chunk.begin) break;
          const int64_t at = (i - run.first_chunk) * kTile * dim_;
          work.keys = size(chunk);
          work.first_seen = in_.num_carried + part.begin - chunk.begin + 1;
          work.key_columns = local.key_columns + at;
          work.key_pairs = local.key_pairs + at;
          work.value_columns = local.value_columns + at;
          key_gradients(work, local.scratch, local.dk + at, local.dv + at);
          if (!waited) turns_.wait(tile, turn);
          waited = true;
          query_gradients(work, local.scratch, add, dq);
          add = true;
        }
      }
      if (turn + 1 == in_.tile_turns[tile]) store_queries(tile);
      turns_.pass(tile, turn);
    }
    for (int64_t i = run.first_chunk; i < run.last_chunk; ++i) {
      const int64_t at = (i - run.first_chunk) * kTile * dim_;
      store_keys(local.dk + at, in_.shape.scale, i, grads_.dk, grads_.dk_sums);
      store_keys(local.dv + at, 1.0f, i, grads_.dv, grads_.dv_sums);
    }
  }

 private:
  // Queries of a tile that lie in the subtree of a run.
  struct Part {
    int64_t begin = 0;
    int64_t rows = 0;
  };

  Part part_of(const TrieChunk& first, int64_t tile) const {
    const int64_t begin = std::max<int64_t>(in_.tile_begins[tile], first.begin - in_.num_carried);
    const int64_t end =
        std::min<int64_t>(in_.tile_begins[tile + 1], first.subtree_end - in_.num_carried);
    return {begin, end - begin};
  }

  void pack_keys(const TrieChunk& chunk, int64_t at, const Local& local) const {
    const int64_t n = size(chunk);
    const int64_t width = round_up(n, kRowStep);
    const uint16_t* rows[kTile];
    for (int64_t i = 0; i < n; ++i) rows[i] = in_.k[chunk.begin + i] + kv_head_ * dim_;
    pack_columns(rows, n, width, dim_, local.key_columns + at);
    pack_pairs(rows, n, width, dim_, local.key_pairs + at);
    for (int64_t i = 0; i < n; ++i) rows[i] = in_.v[chunk.begin + i] + kv_head_ * dim_;
    pack_columns(rows, n, width, dim_, local.value_columns + at);
    std::fill_n(local.dk + at, width * dim_, 0.0f);
    std::fill_n(local.dv + at, width * dim_, 0.0f);
  }

  // The queries' half of the work.
  GradientTile pack_queries(const Part& part, int64_t g, const Local& local) const {
    const int64_t head = kv_head_ * group_ + g;
    GradientTile work;
    work.head_dim = dim_;
    work.scale = in_.shape.scale;
    work.rows = part.rows;
    work.q = in_.q + part.begin * in_.q_stride + head * dim_;
    work.q_stride = in_.q_stride;
    work.grad_out = in_.grad_out + (part.begin * heads_ + head) * dim_;
    work.grad_stride = heads_ * dim_;
    work.q_pairs = local.q_pairs;
    work.grad_pairs = local.grad_pairs;
    work.lse = sums_.lse + g * queries_ + part.begin;
    work.delta = sums_.delta + g * queries_ + part.begin;
    const int64_t width = round_up(part.rows, kRowStep);
    const uint16_t* rows[kTile];
    for (int64_t i = 0; i < part.rows; ++i) rows[i] = work.q + i * work.q_stride;
    pack_pairs(rows, part.rows, width, dim_, local.q_pairs);
    for (int64_t i = 0; i < part.rows; ++i) rows[i] = work.grad_out + i * work.grad_stride;
    pack_pairs(rows, part.rows, width, dim_, local.grad_pairs);
    return work;
  }

  // Into the second-level cache.
  void fetch(const uint16_t* row) const {
    for (int64_t d = 0; d < dim_; d += kLineElements) {
      __builtin_prefetch(row + d, /*rw=*/0, /*locality=*/2);
    }
  }

  // All rows at once, rather than as they are packed.
  void fetch_keys(const ChunkRun& run) const {
    for (int64_t i = in_.chunks[run.first_chunk].begin; i < in_.chunks[run.last_chunk - 1].end;
         ++i) {
      fetch(in_.k[i] + kv_head_ * dim_);
      fetch(in_.v[i] + kv_head_ * dim_);
    }
    if (run.first_tile < run.last_tile) {
      fetch_queries(part_of(in_.chunks[run.first_chunk], run.first_tile), 0);
    }
  }

  // While others are multiplied.
  void fetch_queries(const Part& part, int64_t g) const {
    const int64_t head = kv_head_ * group_ + g;
    for (int64_t row = part.begin; row < part.begin + part.rows; ++row) {
      fetch(in_.q + row * in_.q_stride + head * dim_);
      fetch(in_.grad_out + (row * heads_ + head) * dim_);
    }
  }

  static int64_t size(const TrieChunk& chunk) { return chunk.end - chunk.begin; }

  void clear(int64_t tile, int64_t g) const {
    const int64_t rows = in_.tile_begins[tile + 1] - in_.tile_begins[tile];
    std::fill_n(sums_.dq + (g * queries_ + in_.tile_begins[tile]) * dim_, rows * dim_, 0.0f);
  }

  void store_queries(int64_t tile) const {
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t row = in_.tile_begins[tile]; row < in_.tile_begins[tile + 1]; ++row) {
        round_scaled(dim_,
                     in_.shape.scale,
                     sums_.dq + (g * queries_ + row) * dim_,
                     grads_.dq + (row * heads_ + kv_head_ * group_ + g) * dim_);
      }
    }
  }

  // Sums [keys, D] of a chunk to the rows of its keys.
  void store_keys(
      const float* from, float scale, int64_t index, uint16_t* out, float* const* sums) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t at = kv_head_ * dim_;
    for (int64_t i = 0; i < size(chunk); ++i) {
      const float* row = from + i * dim_;
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
  const RowSums& sums_;
  Turns& turns_;
  int64_t kv_head_;
  int64_t heads_;
  int64_t kv_heads_;
  int64_t dim_;
  int64_t group_;
  int64_t queries_;
};

// lse and delta of the rows of a tile, of kv heads [first, first + sums.size()).
void prepare_rows(const AttendBackwardInput& in,
                  int64_t tile,
                  int64_t first,
                  const std::vector<RowSums>& sums) {
  const int64_t group = in.shape.group();
  const int64_t dim = in.shape.head_dim;
  const int64_t heads = static_cast<int64_t>(sums.size()) * group;
  for (int64_t row = in.tile_begins[tile]; row < in.tile_begins[tile + 1]; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      const RowSums& to = sums[h / group];
      const int64_t at = h % group * in.num_queries() + row;
      const int64_t from = row * in.shape.num_heads + first * group + h;
      to.lse[at] = in.lse[from];
      to.delta[at] = row_dot(dim, in.grad_out + from * dim, in.out + from * dim);
    }
  }
}

}  // namespace

void attend_backward(const AttendBackwardInput& input,
                     const AttendGradients& gradients,
                     Scratch& sums_memory) {
  if (input.num_tiles == 0) return;
  const AttentionShape& shape = input.shape;
  const int64_t rows = input.num_queries() * shape.group();
  Carver count(nullptr);
  carve_sums(count, rows, shape.head_dim);
  Carver local_count(nullptr);
  carve_local(local_count, shape.head_dim);
  const int64_t most = std::clamp<int64_t>(kSumsBytes / count.used(), 1, shape.num_kv_heads);
  std::byte* memory = sums_memory.get<std::byte>(most * count.used());

  for (int64_t first = 0; first < shape.num_kv_heads; first += most) {
    const int64_t heads = std::min(most, shape.num_kv_heads - first);
    std::vector<RowSums> sums;
    std::vector<Turns> turns;
    for (int64_t h = 0; h < heads; ++h) {
      Carver carver(memory + h * count.used());
      sums.push_back(carve_sums(carver, rows, shape.head_dim));
      turns.emplace_back(input.num_tiles);
    }
    const auto backward = [&](int64_t item) {
      const int64_t h = item % heads;
      return Backward(input, gradients, sums[h], turns[h], first + h);
    };
    for_each_item(input.num_tiles, [&](const auto& next) {
      for (int64_t tile = next(); tile >= 0; tile = next()) {
        prepare_rows(input, tile, first, sums);
        for (Turns& turn : turns) turn.reset(tile);
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
