// The phases of a pass; what they compute stands in the header.
#include "banyan/kernels/cpu/decoder_pass.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "banyan/kernels/cpu/pass_pages.h"
#include "banyan/kernels/cpu/pass_stores.h"
#include "banyan/kernels/cpu/rms_norm.h"
#include "banyan/kernels/cpu/rope.h"
#include "banyan/kernels/cpu/swiglu.h"
#include "banyan/kernels/cpu/team_gemm.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {
namespace {

constexpr int64_t kTicketsPerLayer = 5;

const uint16_t* bits(const BFloat16* x) { return reinterpret_cast<const uint16_t*>(x); }
const BFloat16* values(const uint16_t* x) { return reinterpret_cast<const BFloat16*>(x); }

struct Widths {
  explicit Widths(const PassModel& model)
      : x(round_up(model.hidden, 2)),
        q(model.attention.num_heads * model.attention.head_dim),
        k(model.attention.num_kv_heads * model.attention.head_dim),
        qkv(q + 2 * k),
        gate_up(model.intermediate % kPanel == 0 ? 0 : 2 * model.intermediate),
        act(round_up(model.intermediate, 2)) {}
  int64_t x, q, k, qkv, gate_up, act;
};

AttendInput input_of(const PassModel& model, const PassRows& rows) {
  return {.shape = model.attention,
          .num_tokens = rows.num_tokens,
          .q_stride = model.attention.num_heads * model.attention.head_dim,
          .tile_lists = rows.pages,
          .visible = rows.visible,
          .runs = rows.runs};
}

int64_t member_bytes(const PassModel& model, const AttendPlan& plan) {
  const Widths widths(model);
  const int64_t rotated = 2 * (widths.q + 2 * widths.k) * static_cast<int64_t>(sizeof(uint16_t));
  return round_up(std::max(plan.scratch_bytes, rotated), 64);
}

}  // namespace

void PassWorkspace::reserve(const PassModel& model, const PassRows& in) {
  const AttendPlan plan = attend_plan(input_of(model, in), at::get_num_threads());
  member_bytes_ = member_bytes(model, plan);
  attention_.get<std::byte>(member_bytes_ * at::get_num_threads());
  if (static_cast<int>(pages_.size()) < at::get_num_threads()) pages_.resize(at::get_num_threads());
  if (tickets_.size() != model.layers.size() * kTicketsPerLayer) {
    tickets_ = std::vector<Tickets>(model.layers.size() * kTicketsPerLayer);
  }
  // A prompt's last row may be wanted twice: for its score and for the first draw.
  const int64_t rows = round_up(std::max(in.num_tokens, in.num_wanted), kRowTile);
  if (rows <= rows_ && model_ == &model) return;
  const Widths widths(model);
  const auto carve = [&](void* base) {
    Carver carver(base);
    at_.x = carver.take<uint16_t>(rows * widths.x);
    at_.h = carver.take<uint16_t>(rows * widths.x);
    at_.qkv = carver.take<uint16_t>(rows * widths.qkv);
    at_.q = carver.take<uint16_t>(rows * widths.q);
    at_.attended = carver.take<uint16_t>(rows * widths.q);
    at_.gate_up = carver.take<uint16_t>(rows * widths.gate_up);
    at_.act = carver.take<uint16_t>(rows * widths.act);
    return carver.used();
  };
  const int64_t bytes = carve(nullptr);
  std::byte* base = memory_.get<std::byte>(bytes);
  // Columns that fill up an odd depth stay zero for good.
  std::memset(base, 0, static_cast<size_t>(bytes));
  carve(base);
  rows_ = rows;
  model_ = &model;
}

// One member's way through a pass.
class PassRun {
 public:
  PassRun(const PassModel& model,
          const PassRows& rows,
          PassWorkspace& workspace,
          const AttendPlan& plan,
          bool all_wanted,
          uint16_t* hidden,
          Team::Member& member)
      : model_(model),
        in_(rows),
        widths_(model),
        plan_(plan),
        tickets_(workspace.tickets_.data()),
        scratch_(workspace.attention_.get<std::byte>(0) + member.rank() * workspace.member_bytes_),
        at_(workspace.at_),
        num_rows_(rows.num_tokens),
        all_wanted_(all_wanted),
        pages_(workspace.pages_[member.rank()]),
        hidden_(hidden),
        member_(member) {}

  void run() {
    queue_pages(model_.layers[0]);
    embed();
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      const PassLayer& layer = model_.layers[i];
      const bool last = i + 1 == model_.layers.size();
      project_qkv(layer);
      rotate_and_write(layer);
      if (last && in_.num_wanted == 0) break;
      attend(layer);
      last ? pages_.clear() : queue_pages(model_.layers[i + 1]);
      if (last && !all_wanted_) keep_wanted();
      project_and_add(layer.out, at_.attended, widths_.q, layer.gate_up.weight);
      norm_rows(layer.post_norm);
      activate(layer);
      const Panels next = last ? Panels{} : model_.layers[i + 1].qkv.weight;
      project_and_add(layer.down, at_.act, widths_.act, next);
      if (!last) norm_rows(model_.layers[i + 1].input_norm);
    }
    finish();
    gemm_release();
  }

 private:
  // The pages of the member's part of the rows, which it attends if nobody is held up.
  void queue_pages(const PassLayer& layer) {
    const int64_t n = in_.num_writes;
    queue_pages_of(
        in_, model_.attention, layer.tiles, member_.first_of(n), member_.last_of(n), pages_);
  }

  void embed() {
    const uint16_t* weight = model_.layers[0].input_norm;
    for (int64_t t = member_.first_of(num_rows_); t < member_.last_of(num_rows_); ++t) {
      BFloat16* row = reinterpret_cast<BFloat16*>(at_.x + t * widths_.x);
      model_.embedding_transposed ? unpack_row_transposed(model_.embedding, in_.ids[t], row)
                                  : unpack_row(model_.embedding, in_.ids[t], row);
      norm_row(t, weight);
    }
    member_.barrier();
  }

  void norm_row(int64_t row, const uint16_t* weight) {
    const int64_t at = row * widths_.x;
    rms_norm_rows(1, model_.hidden, model_.norm_eps, at_.x + at, weight, at_.h + at);
  }

  void norm_rows(const uint16_t* weight) {
    for (int64_t r = member_.first_of(num_rows_); r < member_.last_of(num_rows_); ++r) {
      norm_row(r, weight);
    }
    member_.barrier();
  }

  void project_qkv(const PassLayer& layer) {
    store_product(layer.qkv, at_.h, widths_.x, layer.out.weight, at_.qkv, widths_.qkv);
  }

  void store_product(const PassProduct& product,
                     const uint16_t* a,
                     int64_t lda,
                     const Panels& next,
                     uint16_t* out,
                     int64_t ld_out) {
    team_gemm<1>(member_,
                 *tickets_++,
                 {.a = values(a),
                  .lda = lda,
                  .rows = num_rows_,
                  .weight = product.weight,
                  .next = next,
                  .then = &pages_},
                 [&](const auto& tiles, int64_t row, int64_t n, int64_t column, int64_t columns) {
                   store_bf16(tiles[0],
                              kPanel,
                              n,
                              columns,
                              product.bias == nullptr ? nullptr : product.bias + column,
                              reinterpret_cast<BFloat16*>(out + row * ld_out + column),
                              ld_out);
                 });
    member_.barrier();
  }

  void project_and_add(const PassProduct& product,
                       const uint16_t* a,
                       int64_t lda,
                       const Panels& next) {
    team_gemm<1>(member_,
                 *tickets_++,
                 {.a = values(a),
                  .lda = lda,
                  .rows = num_rows_,
                  .weight = product.weight,
                  .next = next,
                  .then = &pages_},
                 [&](const auto& tiles, int64_t row, int64_t n, int64_t column, int64_t columns) {
                   add_rounded(tiles[0],
                               kPanel,
                               n,
                               columns,
                               product.bias == nullptr ? nullptr : bits(product.bias) + column,
                               at_.x + row * widths_.x + column,
                               widths_.x);
                 });
    member_.barrier();
  }

  void activate(const PassLayer& layer) {
    const PassProduct& product = layer.gate_up;
    if (widths_.gate_up > 0) {  // gate and up share a panel
      store_product(product, at_.h, widths_.x, layer.down.weight, at_.gate_up, widths_.gate_up);
      for (int64_t r = member_.first_of(num_rows_); r < member_.last_of(num_rows_); ++r) {
        swiglu_rows(
            1, model_.intermediate, at_.gate_up + r * widths_.gate_up, at_.act + r * widths_.act);
      }
    } else {
      team_gemm<2>(member_,
                   *tickets_++,
                   {.a = values(at_.h),
                    .lda = widths_.x,
                    .rows = num_rows_,
                    .weight = product.weight,
                    .next = layer.down.weight,
                    .then = &pages_},
                   [&](const auto& tiles, int64_t row, int64_t n, int64_t column, int64_t columns) {
                     const uint16_t* bias = bits(product.bias);
                     swiglu_tiles(tiles[0],
                                  tiles[1],
                                  kPanel,
                                  n,
                                  columns,
                                  bias == nullptr ? nullptr : bias + column,
                                  bias == nullptr ? nullptr : bias + model_.intermediate + column,
                                  at_.act + row * widths_.act + column,
                                  widths_.act);
                   });
    }
    member_.barrier();
  }

  // Norm and RoPE of `heads` heads of a token; norms go through `rotated` + their size.
  void rotate(int64_t token,
              int64_t heads,
              const uint16_t* raw,
              const uint16_t* norm,
              uint16_t* between,
              uint16_t* rotated) {
    const int64_t dim = model_.attention.head_dim;
    if (norm != nullptr) {
      rms_norm_rows(heads, dim, model_.norm_eps, raw, norm, between);
      raw = between;
    }
    const int64_t at = in_.positions[token] * (dim / 2);
    rope_token(heads, dim / 2, 1.0f, model_.cos + at, model_.sin + at, raw, rotated);
  }

  void rotate_and_write(const PassLayer& layer) {
    const AttentionShape& shape = model_.attention;
    uint16_t* key = reinterpret_cast<uint16_t*>(scratch_);
    uint16_t* between = key + widths_.k;
    const int64_t num_writes = in_.num_writes;
    for (int64_t w = member_.first_of(num_writes); w < member_.last_of(num_writes); ++w) {
      for (int64_t t = in_.writes[w].first; t < in_.writes[w].first + in_.writes[w].count; ++t) {
        const uint16_t* row = at_.qkv + t * widths_.qkv;
        rotate(t, shape.num_heads, row, layer.q_norm, between, at_.q + t * widths_.q);
        rotate(t, shape.num_kv_heads, row + widths_.q, layer.k_norm, between, key);
        const int64_t page = in_.pages[t][in_.positions[t] / kTileTokens];
        for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
          write_position(
              key + head * shape.head_dim,
              row + widths_.q + widths_.k + head * shape.head_dim,
              in_.positions[t] % kTileTokens,
              shape.head_dim,
              layer.tiles + (page * shape.num_kv_heads + head) * tile_elements(shape.head_dim));
        }
      }
    }
    member_.barrier();
  }

  void attend(const PassLayer& layer) {
    AttendInput input = input_of(model_, in_);
    input.q = at_.q;
    input.tiles = layer.tiles;
    Tickets& tickets = *tickets_++;
    for (int64_t item = member_.rank(); item < plan_.num_items; item = tickets.next(member_)) {
      attend_item(input, plan_, item, scratch_, at_.attended, /*lse=*/nullptr);
    }
    member_.barrier();
  }

  // Rows that nobody wants end here: the others move together, each into a buffer that is free.
  void keep_wanted() {
    for (int64_t i = member_.first_of(in_.num_wanted); i < member_.last_of(in_.num_wanted); ++i) {
      const int64_t from = in_.wanted[i];
      std::memcpy(at_.h + i * widths_.x, at_.x + from * widths_.x, 2 * model_.hidden);
      std::memcpy(at_.q + i * widths_.q, at_.attended + from * widths_.q, 2 * widths_.q);
    }
    std::swap(at_.h, at_.x);
    std::swap(at_.q, at_.attended);
    num_rows_ = in_.num_wanted;
    member_.barrier();
  }

  void finish() {
    const int64_t n = in_.num_wanted;
    for (int64_t i = member_.first_of(n); i < member_.last_of(n); ++i) {
      rms_norm_rows(1,
                    model_.hidden,
                    model_.norm_eps,
                    at_.x + i * widths_.x,
                    model_.final_norm,
                    hidden_ + i * model_.hidden);
    }
  }

  const PassModel& model_;
  const PassRows& in_;
  const Widths widths_;
  const AttendPlan& plan_;
  Tickets* tickets_;  // of the next phase
  std::byte* scratch_;
  PassWorkspace::Buffers at_;  // the member's own view: keep_wanted exchanges buffers
  int64_t num_rows_;
  bool all_wanted_;  // in order
  FetchQueue& pages_;
  uint16_t* hidden_;
  Team::Member& member_;
};

void decoder_pass(const PassModel& model,
                  const PassRows& rows,
                  PassWorkspace& workspace,
                  uint16_t* hidden) {
  if (rows.num_tokens == 0) return;
  workspace.reserve(model, rows);
  workspace.start();
  const AttendPlan plan = attend_plan(input_of(model, rows), at::get_num_threads());
  bool all_wanted = rows.num_wanted == rows.num_tokens;
  for (int64_t i = 0; i < rows.num_wanted; ++i) all_wanted = all_wanted && rows.wanted[i] == i;
  Team::run([&](Team::Member& member) {
    PassRun(model, rows, workspace, plan, all_wanted, hidden, member).run();
  });
}

}  // namespace banyan::kernels
