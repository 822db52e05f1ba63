// Attention backward over one packed trie; formulas in the header.
//
// One kv head at a time: first every chunk is packed in the forms that brgemm wants (each form of a
// chunk is `width` = round_up(size, 16) tokens wide, zero beyond its tokens), then both passes run
// as one list of work items. Rows of the left operands are copied too, so they may be read up to
// `width`.
#include "banyan/kernels/cpu/attention_backward.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/lanes.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

// delta = sum over d of dO * O, sixteen lanes and one tree.
BANYAN_MULTIVERSION
float row_dot(int64_t head_dim, const uint16_t* __restrict a, const uint16_t* __restrict b) {
  Lanes lanes;
  const int64_t whole = head_dim / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      lanes.at[i] = fma(bf16_to_f32(a[first + i]), bf16_to_f32(b[first + i]), lanes.at[i]);
    }
  }
  for (int64_t d = whole; d < head_dim; ++d) {
    lanes.at[d - whole] = fma(bf16_to_f32(a[d]), bf16_to_f32(b[d]), lanes.at[d - whole]);
  }
  return lanes.sum();
}

// Rows are keys, columns queries (lse = +inf and delta = 0 beyond the last). On the diagonal chunk
// a query sees the keys up to its own.
BANYAN_MULTIVERSION
void grad_scores_by_key(int64_t keys,
                        int64_t queries,
                        bool diagonal,
                        float scale,
                        const float* __restrict scores,
                        const float* __restrict grad_probs,
                        const float* __restrict lse,
                        const float* __restrict delta,
                        uint16_t* __restrict probs,
                        uint16_t* __restrict grad_scores) {
  const auto columns = static_cast<int32_t>(queries);
  for (int32_t key = 0; key < static_cast<int32_t>(keys); ++key) {
    const float* s = scores + key * columns;
    const float* dp = grad_probs + key * columns;
    uint16_t* p = probs + key * columns;
    uint16_t* ds = grad_scores + key * columns;
    const int32_t first = diagonal ? key : 0;
    for (int32_t query = 0; query < columns; ++query) {
      const float e = exp_f32(fma(s[query], scale, -lse[query]));
      const float seen = query < first ? 0.0f : e;
      const float grad = e * (dp[query] - delta[query]);
      p[query] = round_number(seen);
      ds[query] = round_number(query < first ? 0.0f : grad);
    }
  }
}

// Rows are queries, columns keys, of which the first `valid` exist.
BANYAN_MULTIVERSION
void grad_scores_by_query(int64_t queries,
                          int64_t keys,
                          int64_t valid,
                          bool diagonal,
                          float scale,
                          const float* __restrict scores,
                          const float* __restrict grad_probs,
                          const float* __restrict lse,
                          const float* __restrict delta,
                          uint16_t* __restrict grad_scores) {
  const auto columns = static_cast<int32_t>(keys);
  for (int32_t query = 0; query < static_cast<int32_t>(queries); ++query) {
    const float* s = scores + query * columns;
    const float* dp = grad_probs + query * columns;
    uint16_t* ds = grad_scores + query * columns;
    const auto seen = static_cast<int32_t>(diagonal ? std::min(valid, query + int64_t{1}) : valid);
    const float offset = -lse[query];
    const float mean = delta[query];
    for (int32_t key = 0; key < columns; ++key) {
      const float grad = exp_f32(fma(s[key], scale, offset)) * (dp[key] - mean);
      ds[key] = round_number(key < seen ? grad : 0.0f);
    }
  }
}

// bf16(scale * acc), n values.
BANYAN_MULTIVERSION
void round_scaled(int64_t n, float scale, const float* __restrict acc, uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(acc[i] * scale);
}

// bf16(scale * acc + sums), n values.
BANYAN_MULTIVERSION
void round_scaled_sums(int64_t n,
                       float scale,
                       const float* __restrict acc,
                       const float* __restrict sums,
                       uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(fma(acc[i], scale, sums[i]));
}

// sums += scale * acc, n values.
BANYAN_MULTIVERSION
void add_scaled(int64_t n, float scale, const float* __restrict acc, float* __restrict sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] = fma(acc[i], scale, sums[i]);
}

namespace {

// The packed operands of one kv head and the query heads of its group. A chunk's part of an array
// starts at offset * D (lse, delta: offset). Query arrays begin with the first chunk that is not
// carried, those of head g of the group at g * (padded queries) * D.
struct Packs {
  uint16_t* key_columns;    // [D / 2][width][2]
  uint16_t* key_pairs;      // [width / 2][D][2]
  uint16_t* value_columns;  // [D / 2][width][2]
  uint16_t* query_columns;  // per head
  uint16_t* query_pairs;    // per head
  uint16_t* grad_columns;   // per head: dO
  uint16_t* grad_pairs;     // per head
  float* lse;               // per head; +inf beyond a chunk's tokens
  float* delta;             // per head; 0 beyond
};

// Tokens of the packed arrays, every chunk rounded up.
struct Padded {
  int64_t keys = 0;
  int64_t carried = 0;  // the carried ones of them
  int64_t queries() const { return keys - carried; }
};

Packs carve_packs(Carver& carver, const Padded& padded, int64_t dim, int64_t group) {
  Packs packs{};
  packs.key_columns = carver.take<uint16_t>(padded.keys * dim);
  packs.key_pairs = carver.take<uint16_t>(padded.keys * dim);
  packs.value_columns = carver.take<uint16_t>(padded.keys * dim);
  packs.query_columns = carver.take<uint16_t>(group * padded.queries() * dim);
  packs.query_pairs = carver.take<uint16_t>(group * padded.queries() * dim);
  packs.grad_columns = carver.take<uint16_t>(group * padded.queries() * dim);
  packs.grad_pairs = carver.take<uint16_t>(group * padded.queries() * dim);
  packs.lse = carver.take<float>(group * padded.queries());
  packs.delta = carver.take<float>(group * padded.queries());
  return packs;
}

struct Local {
  uint16_t* left;         // [64, D] rows of Q or K
  uint16_t* left_grad;    // [64, D] rows of dO or V
  float* scores;          // [64, 64]
  float* grad_probs;      // [64, 64]
  uint16_t* probs;        // [64, 64]
  uint16_t* grad_scores;  // [64, 64]
  float* acc;             // [64, D]
  float* acc_value;       // [64, D]
  int32_t* path;          // [max_depth + 1]
};

Local carve_local(Carver& carver, int64_t dim, int64_t max_depth) {
  Local local{};
  local.left = carver.take<uint16_t>(kTileTokens * dim);
  local.left_grad = carver.take<uint16_t>(kTileTokens * dim);
  local.scores = carver.take<float>(kTileTokens * kTileTokens);
  local.grad_probs = carver.take<float>(kTileTokens * kTileTokens);
  local.probs = carver.take<uint16_t>(kTileTokens * kTileTokens);
  local.grad_scores = carver.take<uint16_t>(kTileTokens * kTileTokens);
  local.acc = carver.take<float>(kTileTokens * dim);
  local.acc_value = carver.take<float>(kTileTokens * dim);
  local.path = carver.take<int32_t>(max_depth + 1);
  return local;
}

class Backward {
 public:
  Backward(const AttendBackwardInput& input,
           const AttendGradients& gradients,
           const Packs& packs,
           const Padded& padded,
           int64_t kv_head)
      : in_(input),
        grads_(gradients),
        packs_(packs),
        padded_(padded),
        kv_head_(kv_head),
        heads_(input.shape.num_heads),
        kv_heads_(input.shape.num_kv_heads),
        dim_(input.shape.head_dim),
        group_(input.shape.group()) {}

  void pack(int64_t index) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t n = size(chunk);
    const int64_t w = width(chunk);
    const int64_t at = chunk.offset * dim_;
    const uint16_t* rows[kTileTokens];
    point_keys(in_.k, chunk, rows);
    pack_columns(rows, n, w, dim_, packs_.key_columns + at);
    pack_pairs(rows, n, w, dim_, packs_.key_pairs + at);
    point_keys(in_.v, chunk, rows);
    pack_columns(rows, n, w, dim_, packs_.value_columns + at);
    if (index < in_.first_own) return;
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = kv_head_ * group_ + g;
      const int64_t at_row = query_row(chunk, g);
      const int64_t at_head = at_row * dim_;
      point_queries(in_.q, head, chunk, rows);
      pack_columns(rows, n, w, dim_, packs_.query_columns + at_head);
      pack_pairs(rows, n, w, dim_, packs_.query_pairs + at_head);
      point_queries(in_.grad_out, head, chunk, rows);
      pack_columns(rows, n, w, dim_, packs_.grad_columns + at_head);
      pack_pairs(rows, n, w, dim_, packs_.grad_pairs + at_head);
      float* lse = packs_.lse + at_row;
      float* delta = packs_.delta + at_row;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = (own(chunk) + i) * heads_ + head;
        lse[i] = in_.lse[row];
        delta[i] = row_dot(dim_, in_.grad_out + row * dim_, in_.out + row * dim_);
      }
      std::fill(lse + n, lse + w, std::numeric_limits<float>::infinity());
      std::fill(delta + n, delta + w, 0.0f);
    }
  }

  // dK and dV of one key chunk.
  void keys(int64_t index, const Local& local) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t w = width(chunk);
    const uint16_t* rows[kTileTokens];
    point_keys(in_.k, chunk, rows);
    copy_rows(rows, chunk, local.left);
    point_keys(in_.v, chunk, rows);
    copy_rows(rows, chunk, local.left_grad);
    std::fill_n(local.acc, w * dim_, 0.0f);
    std::fill_n(local.acc_value, w * dim_, 0.0f);
    for (int64_t other = std::max(index, in_.first_own); other < chunk.subtree_end; ++other) {
      const TrieChunk& queries = in_.chunks[other];
      const int64_t columns = width(queries);
      for (int64_t g = 0; g < group_; ++g) {
        const int64_t at_row = query_row(queries, g);
        const int64_t at = at_row * dim_;
        tile_gemm(w, columns, dim_, false, local.left, packs_.query_columns + at, local.scores);
        tile_gemm(
            w, columns, dim_, false, local.left_grad, packs_.grad_columns + at, local.grad_probs);
        grad_scores_by_key(w,
                           columns,
                           /*diagonal=*/other == index,
                           in_.shape.scale,
                           local.scores,
                           local.grad_probs,
                           packs_.lse + at_row,
                           packs_.delta + at_row,
                           local.probs,
                           local.grad_scores);
        tile_gemm(w, dim_, columns, true, local.probs, packs_.grad_pairs + at, local.acc_value);
        tile_gemm(w, dim_, columns, true, local.grad_scores, packs_.query_pairs + at, local.acc);
      }
    }
    store_keys(local.acc, in_.shape.scale, index, grads_.dk, grads_.dk_sums);
    store_keys(local.acc_value, 1.0f, index, grads_.dv, grads_.dv_sums);
  }

  // dQ of one query chunk, all heads of the group.
  void queries(int64_t index, const Local& local) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t w = width(chunk);
    for (int64_t at = index, i = chunk.depth; i >= 0; at = in_.chunks[at].parent, --i) {
      local.path[i] = static_cast<int32_t>(at);
    }
    const uint16_t* rows[kTileTokens];
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = kv_head_ * group_ + g;
      const int64_t at_row = query_row(chunk, g);
      point_queries(in_.q, head, chunk, rows);
      copy_rows(rows, chunk, local.left);
      point_queries(in_.grad_out, head, chunk, rows);
      copy_rows(rows, chunk, local.left_grad);
      std::fill_n(local.acc, w * dim_, 0.0f);
      for (int64_t i = 0; i <= chunk.depth; ++i) {
        const TrieChunk& keys = in_.chunks[local.path[i]];
        const int64_t columns = width(keys);
        const int64_t at = keys.offset * dim_;
        tile_gemm(w, columns, dim_, false, local.left, packs_.key_columns + at, local.scores);
        tile_gemm(
            w, columns, dim_, false, local.left_grad, packs_.value_columns + at, local.grad_probs);
        grad_scores_by_query(w,
                             columns,
                             size(keys),
                             /*diagonal=*/i == chunk.depth,
                             in_.shape.scale,
                             local.scores,
                             local.grad_probs,
                             packs_.lse + at_row,
                             packs_.delta + at_row,
                             local.grad_scores);
        tile_gemm(w, dim_, columns, true, local.grad_scores, packs_.key_pairs + at, local.acc);
      }
      for (int64_t i = 0; i < size(chunk); ++i) {
        uint16_t* dq = grads_.dq + ((own(chunk) + i) * heads_ + head) * dim_;
        round_scaled(dim_, in_.shape.scale, local.acc + i * dim_, dq);
      }
    }
  }

 private:
  static int64_t size(const TrieChunk& chunk) { return chunk.end - chunk.begin; }
  static int64_t width(const TrieChunk& chunk) { return round_up(size(chunk), kRowStep); }

  // Row of a chunk's first token among those that have queries.
  int64_t own(const TrieChunk& chunk) const { return chunk.begin - in_.num_carried; }
  // The same in the packed arrays, for query head g of the group.
  int64_t query_row(const TrieChunk& chunk, int64_t g) const {
    return g * padded_.queries() + chunk.offset - padded_.carried;
  }

  void point_keys(const uint16_t* const* x, const TrieChunk& chunk, const uint16_t** rows) const {
    for (int64_t i = 0; i < size(chunk); ++i) rows[i] = x[chunk.begin + i] + kv_head_ * dim_;
  }

  void point_queries(const uint16_t* x,
                     int64_t head,
                     const TrieChunk& chunk,
                     const uint16_t** rows) const {
    for (int64_t i = 0; i < size(chunk); ++i) {
      rows[i] = x + ((own(chunk) + i) * heads_ + head) * dim_;
    }
  }

  void copy_rows(const uint16_t* const* rows, const TrieChunk& chunk, uint16_t* out) const {
    const size_t bytes = static_cast<size_t>(dim_) * sizeof(uint16_t);
    const int64_t n = size(chunk);
    for (int64_t i = 0; i < n; ++i) std::memcpy(out + i * dim_, rows[i], bytes);
    std::memset(out + n * dim_, 0, static_cast<size_t>(width(chunk) - n) * bytes);
  }

  void store_keys(
      const float* acc, float scale, int64_t index, uint16_t* out, float* const* sums) const {
    const TrieChunk& chunk = in_.chunks[index];
    const int64_t at = kv_head_ * dim_;
    for (int64_t i = 0; i < size(chunk); ++i) {
      const float* row = acc + i * dim_;
      float* sum = sums == nullptr ? nullptr : sums[chunk.begin + i];
      if (index < in_.first_own) {
        add_scaled(dim_, scale, row, sum + at);
        continue;
      }
      uint16_t* to = out + (own(chunk) + i) * kv_heads_ * dim_ + at;
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
  Padded padded_;
  int64_t kv_head_;
  int64_t heads_;
  int64_t kv_heads_;
  int64_t dim_;
  int64_t group_;
};

}  // namespace

void attend_backward(const AttendBackwardInput& input,
                     const AttendGradients& gradients,
                     Scratch& packs_memory) {
  if (input.num_chunks == input.first_own) return;
  const AttentionShape& shape = input.shape;
  const TrieChunk& last = input.chunks[input.num_chunks - 1];
  const Padded padded{.keys = last.offset + round_up(last.end - last.begin, kRowStep),
                      .carried = input.chunks[input.first_own].offset};

  Carver count(nullptr);
  carve_packs(count, padded, shape.head_dim, shape.group());
  Carver packs_carver(packs_memory.get<std::byte>(count.used()));
  const Packs packs = carve_packs(packs_carver, padded, shape.head_dim, shape.group());

  const int64_t num_items = 2 * input.num_chunks - input.first_own;
  Carver local_count(nullptr);
  carve_local(local_count, shape.head_dim, input.max_depth);

  for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const Backward backward(input, gradients, packs, padded, kv_head);
    for_each_item(input.num_chunks, [&](const auto& next) {
      for (int64_t item = next(); item >= 0; item = next()) backward.pack(item);
    });
    for_each_item(num_items, [&](const auto& next) {
      static thread_local Scratch memory;
      Carver carver(memory.get<std::byte>(local_count.used()));
      const Local local = carve_local(carver, shape.head_dim, input.max_depth);
      for (int64_t item = next(); item >= 0; item = next()) {
        if (item < input.num_chunks) {
          backward.keys(item, local);
        } else {
          backward.queries(item - input.num_chunks + input.first_own, local);
        }
      }
      gemm_release();
    });
  }
}

}  // namespace banyan::kernels
