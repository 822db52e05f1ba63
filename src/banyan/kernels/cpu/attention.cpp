// Attention forward over tiles; the formula is in the header.
//
// A work item is one kv head and a block of consecutive tokens; its rows are (token, query head of
// the group), token major. For every tile number j, runs of neighbouring tokens whose j-th tile is
// the same (a *span*) share one S = Q Kᵀ and one P V, over the columns that one of them sees,
// rounded up to vectors of 16. Row counts are rounded up in scratch memory where brgemm wants it;
// what the extra rows hold is never read.
#include "banyan/kernels/cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "banyan/kernels/cpu/attention_rows.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/lanes.h"
#include "banyan/kernels/cpu/multiversion.h"
#include "banyan/kernels/cpu/scratch.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct BlockScratch {
  uint16_t* q;      // [rows, D]
  float* scores;    // [rows, max(64, D)]: S, then P V of one tile
  uint16_t* probs;  // [rows, 64]
  float* out;       // [rows, D]
  float* max;       // [rows]
  float* sum;       // [rows]
  float* alpha;     // [rows]
  int32_t* valid;   // [rows]
};

BlockScratch carve(Carver& carver, int64_t rows, int64_t head_dim) {
  BlockScratch block{};
  block.q = carver.take<uint16_t>(rows * head_dim);
  block.scores = carver.take<float>(rows * std::max(head_dim, kTileTokens));
  block.probs = carver.take<uint16_t>(rows * kTileTokens);
  block.out = carver.take<float>(rows * head_dim);
  block.max = carver.take<float>(rows);
  block.sum = carver.take<float>(rows);
  block.alpha = carver.take<float>(rows);
  block.valid = carver.take<int32_t>(rows);
  return block;
}

// One row of 16 kV scores becomes probabilities; `max` goes in as the running maximum of the row
// and comes out as the new one. Returns the sum of the probabilities, as if columns up to 64 were
// there with probability zero.
template <int32_t kV>
BANYAN_INLINE float softmax_row(
    int32_t valid, float scale, float* __restrict s, uint16_t* __restrict p, float* max) {
  constexpr int32_t kColumns = 16 * kV;
  for (int32_t i = 0; i < kColumns; ++i) s[i] = i < valid ? s[i] * scale : kNegInf;
  // Sixteen columns apart, so that each statement is one vector operation.
  Lanes largest;
  for (int64_t i = 0; i < kLanes; ++i) {
    float lane = s[i];
    if (kV > 1) lane = lane > s[i + 16] ? lane : s[i + 16];
    if (kV > 2) lane = lane > s[i + 32] ? lane : s[i + 32];
    if (kV > 3) lane = lane > s[i + 48] ? lane : s[i + 48];
    largest.at[i] = lane;
  }
  const float tile_max = largest.max();
  const float new_max = *max > tile_max ? *max : tile_max;
  for (int32_t i = 0; i < kColumns; ++i) {
    s[i] = exp_f32(s[i] - new_max);
    p[i] = round_number(s[i]);
  }
  Lanes total;
  for (int64_t i = 0; i < kLanes; ++i) {
    float lane = s[i];
    if (kV > 1) lane += s[i + 16];
    if (kV > 2) lane += s[i + 32];
    if (kV > 3) lane += s[i + 48];
    total.at[i] = lane;
  }
  *max = new_max;
  return total.sum();
}

template <int32_t kV>
BANYAN_INLINE void softmax_rows(int64_t rows,
                                int64_t valid,
                                float scale,
                                float* __restrict scores,
                                uint16_t* __restrict probs,
                                float* __restrict row_max,
                                float* __restrict row_sum,
                                float* __restrict alpha) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t n = rows - first < kLanes ? rows - first : kLanes;
    float shift[kLanes] = {};
    float total[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = first + i;
      const float old_max = row_max[row];
      total[i] = softmax_row<kV>(static_cast<int32_t>(valid),
                                 scale,
                                 scores + row * kTileTokens,
                                 probs + row * kTileTokens,
                                 &row_max[row]);
      shift[i] = old_max - row_max[row];
    }
    for (int64_t i = 0; i < kLanes; ++i) shift[i] = exp_f32(shift[i]);
    for (int64_t i = 0; i < n; ++i) {
      alpha[first + i] = shift[i];
      row_sum[first + i] = fma(row_sum[first + i], shift[i], total[i]);
    }
  }
}

}  // namespace

// One tile of the online softmax for rows whose first `valid` columns are visible: updates max, sum
// and alpha of the rows, and turns 16 `vectors` scores of each into probs (row strides 64).
BANYAN_MULTIVERSION
void softmax_tile(int64_t rows,
                  int64_t vectors,
                  int64_t valid,
                  float scale,
                  float* __restrict scores,
                  uint16_t* __restrict probs,
                  float* __restrict row_max,
                  float* __restrict row_sum,
                  float* __restrict alpha) {
  switch (vectors) {
    case 1:
      return softmax_rows<1>(rows, valid, scale, scores, probs, row_max, row_sum, alpha);
    case 2:
      return softmax_rows<2>(rows, valid, scale, scores, probs, row_max, row_sum, alpha);
    case 3:
      return softmax_rows<3>(rows, valid, scale, scores, probs, row_max, row_sum, alpha);
    default:
      return softmax_rows<4>(rows, valid, scale, scores, probs, row_max, row_sum, alpha);
  }
}

// O = alpha O + (P V of one tile), row by row. Adding zero turns a -0 into 0, as products of zero
// probabilities would, so it does not matter how many of those were computed.
BANYAN_MULTIVERSION
void merge_tile(int64_t rows,
                int64_t head_dim,
                const float* __restrict alpha,
                const float* __restrict tile_out,
                float* __restrict out) {
  for (int64_t row = 0; row < rows; ++row) {
    const float a = alpha[row];
    for (int64_t d = 0; d < head_dim; ++d) {
      out[row * head_dim + d] =
          fma(out[row * head_dim + d], a, tile_out[row * head_dim + d] + 0.0f);
    }
  }
}

// out = bf16(O / l) of neighbouring rows.
BANYAN_MULTIVERSION
void finish_rows(int64_t rows,
                 int64_t head_dim,
                 const float* __restrict sum,
                 const float* __restrict acc,
                 uint16_t* __restrict out) {
  for (int64_t row = 0; row < rows; ++row) {
    const float inverse = 1.0f / sum[row];
    for (int64_t d = 0; d < head_dim; ++d) {
      out[row * head_dim + d] = f32_to_bf16(acc[row * head_dim + d] * inverse);
    }
  }
}

// lse = m + log l
BANYAN_MULTIVERSION
void log_sums(int64_t rows,
              const float* __restrict max,
              const float* __restrict sum,
              float* __restrict lse) {
  for (int64_t row = 0; row < rows; ++row) lse[row] = max[row] + log_f32(sum[row]);
}

namespace {

// Tokens [begin, end) of one kv head.
class AttendBlock {
 public:
  AttendBlock(const AttendInput& input, const BlockScratch& scratch)
      : input_(input),
        scratch_(scratch),
        group_(input.shape.group()),
        dim_(input.shape.head_dim),
        fused_(input.fused && attend_rows_available(dim_)) {}

  void run(int64_t kv_head, int64_t begin, int64_t end, uint16_t* out, float* lse) {
    load(kv_head, begin, end);
    int64_t longest = 0;
    for (int64_t t = begin; t < end; ++t) longest = std::max<int64_t>(longest, input_.visible[t]);
    for (int64_t first = 0; first < longest; first += kTileTokens) {
      for (int64_t t = begin; t < end;) {
        if (input_.visible[t] <= first) {
          ++t;
          continue;
        }
        const int32_t tile = input_.tile_lists[t][first / kTileTokens];
        int64_t stop = t + 1;
        while (stop < end && input_.visible[stop] > first &&
               input_.tile_lists[stop][first / kTileTokens] == tile) {
          ++stop;
        }
        span(kv_head, first, tile, next_tile(first, begin, stop, end), begin, t, stop);
        t = stop;
      }
    }
    store(kv_head, begin, end, out, lse);
  }

 private:
  // The tile that is read after that of tokens before `stop`, if all of it is: of the next token,
  // or of the first one further on. Else -1: a tile that is filled little costs more to fetch than
  // it gives.
  int32_t next_tile(int64_t first, int64_t begin, int64_t stop, int64_t end) const {
    const int64_t j = first / kTileTokens;
    const bool same = stop < end && input_.visible[stop] > first;
    const int64_t token = same ? stop : begin;
    const int64_t tile = same ? j : j + 1;
    const bool whole = input_.visible[token] >= (tile + 1) * kTileTokens;
    return whole ? input_.tile_lists[token][tile] : -1;
  }

  const uint16_t* tile_at(int32_t tile, int64_t kv_head) const {
    return input_.tiles + (tile * input_.shape.num_kv_heads + kv_head) * tile_elements(dim_);
  }

  void load(int64_t kv_head, int64_t begin, int64_t end) {
    const int64_t rows = (end - begin) * group_;
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(scratch_.q + (t - begin) * group_ * dim_,
                  input_.q + t * input_.q_stride + kv_head * group_ * dim_,
                  static_cast<size_t>(group_ * dim_) * sizeof(uint16_t));
    }
    std::fill_n(scratch_.out, rows * dim_, 0.0f);
    std::fill_n(scratch_.max, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(scratch_.sum, rows, 0.0f);
  }

  int64_t valid_of(int64_t t, int64_t first) const {
    return std::min<int64_t>(kTileTokens, input_.visible[t] - first);
  }

  // Rows of tokens [t, stop), which read the same tile for path positions first, first + 1, ...
  void span(int64_t kv_head,
            int64_t first,
            int32_t tile,
            int32_t next,
            int64_t begin,
            int64_t t,
            int64_t stop) {
    const int64_t rows = (stop - t) * group_;
    const int64_t row0 = (t - begin) * group_;
    const uint16_t* keys = tile_at(tile, kv_head);
    if (fused_) {
      for (int64_t i = t; i < stop; ++i) {
        std::fill_n(scratch_.valid + (i - t) * group_, group_, valid_of(i, first));
      }
      attend_rows({.rows = rows,
                   .head_dim = dim_,
                   .q = scratch_.q + row0 * dim_,
                   .tile = keys,
                   .valid = scratch_.valid,
                   .scale = input_.shape.scale,
                   .out = scratch_.out + row0 * dim_,
                   .max = scratch_.max + row0,
                   .sum = scratch_.sum + row0,
                   .next = next < 0 || next == tile ? nullptr : tile_at(next, kv_head)});
      return;
    }
    int64_t most = 0;  // columns that one of the rows sees
    for (int64_t i = t; i < stop; ++i) most = std::max(most, valid_of(i, first));
    const int64_t padded = padded_rows(rows);
    const int64_t columns = padded_columns(round_up(most, kLanes), kTileTokens);
    tile_gemm({.m = padded,
               .n = columns,
               .k = dim_,
               .a = scratch_.q + row0 * dim_,
               .lda = dim_,
               .b = keys,
               .c = scratch_.scores,
               .ld = kTileTokens});
    for (int64_t from = t; from < stop;) {
      // Tokens that see the same number of columns: all of a full tile, or one on the diagonal.
      const int64_t valid = valid_of(from, first);
      int64_t to = from + 1;
      while (to < stop && valid_of(to, first) == valid) ++to;
      const int64_t row = (from - t) * group_;
      softmax_tile((to - from) * group_,
                   columns / kLanes,
                   valid,
                   input_.shape.scale,
                   scratch_.scores + row * kTileTokens,
                   scratch_.probs + row * kTileTokens,
                   scratch_.max + row0 + row,
                   scratch_.sum + row0 + row,
                   scratch_.alpha + row0 + row);
      from = to;
    }
    tile_gemm({.m = padded,
               .n = dim_,
               .k = padded_columns(round_up(most, 2), kTileTokens),
               .a = scratch_.probs,
               .lda = kTileTokens,
               .b = keys + kTileTokens * dim_,
               .c = scratch_.scores,
               .ld = dim_});
    merge_tile(rows, dim_, scratch_.alpha + row0, scratch_.scores, scratch_.out + row0 * dim_);
  }

  void store(int64_t kv_head, int64_t begin, int64_t end, uint16_t* out, float* lse) {
    float* logs = scratch_.alpha;
    if (lse != nullptr) log_sums((end - begin) * group_, scratch_.max, scratch_.sum, logs);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = (t - begin) * group_;
      const int64_t head = t * input_.shape.num_heads + kv_head * group_;
      finish_rows(group_, dim_, scratch_.sum + row, scratch_.out + row * dim_, out + head * dim_);
      if (lse != nullptr) std::copy_n(logs + row, group_, lse + head);
    }
  }

  const AttendInput& input_;
  BlockScratch scratch_;
  int64_t group_;
  int64_t dim_;
  bool fused_;
};

}  // namespace

int64_t attend_scratch_bytes(const AttentionShape& shape, int64_t block_tokens) {
  Carver count(nullptr);
  carve(count, block_tokens * shape.group() + kRowStep, shape.head_dim);
  return count.used();
}

void attend_item(const AttendInput& input,
                 const AttendPlan& plan,
                 int64_t item,
                 void* scratch,
                 uint16_t* out,
                 float* lse) {
  Carver carver(scratch);
  // A span starts at any row, and its row count is rounded up from there.
  const int64_t rows = plan.block_tokens * input.shape.group() + kRowStep;
  AttendBlock block(input, carve(carver, rows, input.shape.head_dim));
  // Neighbouring blocks of one kv head read the same trunks: items keep them close in time.
  const int64_t first_head = item / plan.num_blocks * plan.heads_per_item;
  const int64_t begin = item % plan.num_blocks * plan.block_tokens;
  const int64_t end = std::min(begin + plan.block_tokens, input.num_tokens);
  for (int64_t t = begin; t < end;) {
    int64_t stop = end;
    if (input.runs != nullptr) {
      stop = t + 1;
      while (stop < end && input.runs[stop] == input.runs[t]) ++stop;
    }
    for (int64_t head = first_head; head < first_head + plan.heads_per_item; ++head) {
      block.run(head, t, stop, out, lse);
    }
    t = stop;
  }
}

void attend(const AttendInput& input, uint16_t* out, float* lse) {
  if (input.num_tokens == 0) return;
  const AttendPlan plan = attend_plan(input, at::get_num_threads());
  for_each_item(plan.num_items, [&](const auto& next) {
    static thread_local Scratch memory;
    void* scratch = memory.get<std::byte>(plan.scratch_bytes);
    for (int64_t item = next(); item >= 0; item = next()) {
      attend_item(input, plan, item, scratch, out, lse);
    }
    gemm_release();
  });
}

}  // namespace banyan::kernels
