// Draws folded with the head; the scheme is in the header. Three phases of a team: the vocabulary,
// segment by segment; the laws of the rows and the tiles that are drawn; those tiles once more.
#include "banyan/kernels/cpu/head_draw.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "banyan/kernels/cpu/team.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {
namespace {

// masses[t].sum = w_t
BANYAN_MULTIVERSION
void weigh(TileMass* masses, int64_t tiles, float max) {
  for (int64_t t = 0; t < tiles; ++t) masses[t].sum *= exp_f32(masses[t].max - max);
}

// mass[i] = e^(s - max)
BANYAN_MULTIVERSION
void token_masses(
    const float* z, int64_t count, float inverse_temperature, float max, float* mass) {
  for (int64_t i = 0; i < count; ++i) mass[i] = exp_f32(z[i] * inverse_temperature - max);
}

// The states of a row's segments, in order.
RowLaw law_of(const SoftmaxState* states, int64_t segments, TileMass* masses, int64_t tiles) {
  SoftmaxState whole;
  for (int64_t s = 0; s < segments; ++s) merge(whole, states[s]);
  RowLaw law{.max = whole.max, .total = 0.0, .log_sum = log_sum_exp(whole)};
  weigh(masses, tiles, law.max);
  for (int64_t t = 0; t < tiles; ++t) law.total += masses[t].sum;
  return law;
}

}  // namespace

bool RowLaw::finite() const {
  return std::isfinite(log_sum) && std::isfinite(total) && total > 0.0;
}

RowLaw row_law(const float* z, int64_t vocabulary, float inverse_temperature, TileMass* masses) {
  SoftmaxState whole;
  for (int64_t first = 0; first < vocabulary; first += kVocabSegment) {
    const int64_t last = std::min(vocabulary, first + kVocabSegment);
    LaneState lanes;
    for (int64_t v = first; v < last; v += kVocabTile) {
      masses[v / kVocabTile] =
          reduce_row(z + v, std::min(kVocabTile, last - v), inverse_temperature, lanes);
    }
    merge(whole, collapse(lanes));
  }
  return law_of(&whole, 1, masses, vocab_tiles(vocabulary));
}

TilePick pick_tile(const RowLaw& law, const TileMass* masses, int64_t vocabulary, float u) {
  TilePick pick{.tile = 0, .start = 0.0, .target = static_cast<double>(u) * law.total};
  double end = 0.0;
  const int64_t tiles = vocab_tiles(vocabulary);
  for (int64_t t = 0; t < tiles && end <= pick.target; ++t) {
    if (masses[t].sum == 0.0f) continue;
    pick.tile = t;
    pick.start = end;
    end += masses[t].sum;
  }
  return pick;
}

int64_t pick_in_tile(const RowLaw& law,
                     const TilePick& pick,
                     const float* z,
                     int64_t count,
                     float inverse_temperature) {
  alignas(64) float mass[kVocabTile];
  token_masses(z, count, inverse_temperature, law.max, mass);
  // The last token with mass, should rounding keep the sum below the target.
  int64_t chosen = 0;
  double start = pick.start;
  for (int64_t i = 0; i < count && start <= pick.target; ++i) {
    if (mass[i] == 0.0f) continue;
    chosen = i;
    start += mass[i];
  }
  return chosen;
}

int64_t largest_tile(const RowLaw& law, const TileMass* masses, int64_t vocabulary) {
  // A tile's max covers the tiles of its segment before it, so the first with the row's has it.
  const int64_t tiles = vocab_tiles(vocabulary);
  int64_t t = 0;
  while (t + 1 < tiles && masses[t].max != law.max) ++t;
  return t;
}

int64_t largest_in_tile(const RowLaw& law,
                        const float* z,
                        int64_t count,
                        float inverse_temperature) {
  int64_t i = 0;
  while (i + 1 < count && z[i] * inverse_temperature != law.max) ++i;
  return i;
}

namespace {

class DrawRun {
 public:
  DrawRun(const HeadDrawInput& input, const HeadDrawOutput& output)
      : in_(input),
        out_(output),
        vocabulary_(input.weight.columns),
        segments_(divide_up(vocabulary_, kVocabSegment)),
        tiles_(vocab_tiles(vocabulary_)),
        groups_(divide_up(input.rows, kRowTile)) {
    const auto carve = [&](void* base) {
      Carver carver(base);
      states_ = carver.take<SoftmaxState>(in_.rows * segments_);
      raw_states_ = carver.take<SoftmaxState>(with_raw() ? in_.rows * segments_ : 0);
      masses_ = carver.take<TileMass>(in_.rows * tiles_);
      laws_ = carver.take<RowLaw>(in_.rows);
      raw_sums_ = carver.take<double>(in_.rows);
      picks_ = carver.take<TilePick>(in_.row_offsets[in_.rows]);
      return carver.used();
    };
    static thread_local Scratch memory;
    carve(memory.get<std::byte>(carve(nullptr)));
  }

  void run() {
    Team::run([&](Team::Member& member) {
      const int64_t items = segments_ * groups_;
      for (int64_t item = member.rank(); item < items; item = tickets_.next(member)) {
        reduce(item % groups_, item / groups_);
      }
      member.barrier();
      for (int64_t r = member.first_of(in_.rows); r < member.last_of(in_.rows); ++r) settle(r);
      member.barrier();
      const int64_t draws = in_.row_offsets[in_.rows];
      draw(member.first_of(draws), member.last_of(draws));
      gemm_release();
    });
  }

 private:
  bool with_raw() const { return out_.raw != nullptr; }
  bool needs_raw(int64_t row) const { return with_raw() && in_.inverse_temperature[row] != 1.0f; }

  RowTile rows_at(int64_t row, int64_t count, Scratch& scratch) const {
    return row_tile(
        in_.hidden + row * in_.ld_hidden, in_.ld_hidden, count, in_.weight.depth, scratch);
  }

  // One segment of the vocabulary for one group of rows.
  void reduce(int64_t group, int64_t segment) {
    static thread_local Scratch row_scratch;
    alignas(64) float z[kRowTile * kVocabTile];
    const int64_t row = group * kRowTile;
    const int64_t rows = std::min(kRowTile, in_.rows - row);
    const RowTile tile = rows_at(row, rows, row_scratch);
    std::array<LaneState, kRowTile> lanes;
    std::array<LaneState, kRowTile> raw_lanes;
    const int64_t last = std::min(vocabulary_, (segment + 1) * kVocabSegment);
    for (int64_t v = segment * kVocabSegment; v < last; v += kVocabTile) {
      const int64_t columns = std::min(kVocabTile, last - v);
      logit_tile(tile, in_.weight, v, columns, z);
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = z + r * kVocabTile;
        masses_[(row + r) * tiles_ + v / kVocabTile] =
            reduce_row(from, columns, in_.inverse_temperature[row + r], lanes[r]);
        if (needs_raw(row + r)) {
          reduce_tile(from, 0, 1, columns, 1.0f, /*with_entropy=*/false, &raw_lanes[r]);
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * segments_ + segment;
      states_[at] = collapse(lanes[r]);
      if (needs_raw(row + r)) raw_states_[at] = collapse(raw_lanes[r]);
    }
  }

  // The law of a row and the tiles of its draws.
  void settle(int64_t row) {
    TileMass* masses = masses_ + row * tiles_;
    const RowLaw law = law_of(states_ + row * segments_, segments_, masses, tiles_);
    laws_[row] = law;
    if (!law.finite()) return;
    raw_sums_[row] = law.log_sum;
    if (needs_raw(row)) {
      SoftmaxState whole;
      for (int64_t s = 0; s < segments_; ++s) merge(whole, raw_states_[row * segments_ + s]);
      raw_sums_[row] = log_sum_exp(whole);
    }
    for (int64_t i = in_.row_offsets[row]; i < in_.row_offsets[row + 1]; ++i) {
      picks_[i] = in_.greedy[row] ? TilePick{.tile = largest_tile(law, masses, vocabulary_)}
                                  : pick_tile(law, masses, vocabulary_, in_.uniform[i]);
    }
  }

  void draw(int64_t begin, int64_t end) {
    static thread_local Scratch row_scratch;
    alignas(64) float z[kRowStep * kVocabTile];
    int64_t row = std::upper_bound(in_.row_offsets, in_.row_offsets + in_.rows + 1, begin) -
                  in_.row_offsets - 1;
    int64_t computed_row = -1;
    int64_t computed_tile = -1;
    for (int64_t i = begin; i < end; ++i) {
      while (in_.row_offsets[row + 1] <= i) ++row;
      const RowLaw& law = laws_[row];
      if (!law.finite()) {
        out_.token[i] = -1;
        continue;
      }
      const int64_t first = picks_[i].tile * kVocabTile;
      const int64_t columns = std::min(kVocabTile, vocabulary_ - first);
      if (row != computed_row || picks_[i].tile != computed_tile) {
        logit_tile(rows_at(row, 1, row_scratch), in_.weight, first, columns, z);
        computed_row = row;
        computed_tile = picks_[i].tile;
      }
      const float inverse = in_.inverse_temperature[row];
      const int64_t chosen = in_.greedy[row] ? largest_in_tile(law, z, columns, inverse)
                                             : pick_in_tile(law, picks_[i], z, columns, inverse);
      out_.token[i] = static_cast<int32_t>(first + chosen);
      out_.logprob[i] = static_cast<float>(z[chosen] * inverse - law.log_sum);
      if (with_raw()) out_.raw[i] = static_cast<float>(z[chosen] - raw_sums_[row]);
    }
  }

  const HeadDrawInput& in_;
  const HeadDrawOutput& out_;
  const int64_t vocabulary_;
  const int64_t segments_;
  const int64_t tiles_;
  const int64_t groups_;  // of rows
  Tickets tickets_;
  SoftmaxState* states_ = nullptr;      // [rows, segments]
  SoftmaxState* raw_states_ = nullptr;  // [rows, segments] at T = 1
  TileMass* masses_ = nullptr;          // [rows, tiles]
  RowLaw* laws_ = nullptr;              // [rows]
  double* raw_sums_ = nullptr;          // [rows]
  TilePick* picks_ = nullptr;           // [draws]
};

}  // namespace

void head_draw(const HeadDrawInput& input, const HeadDrawOutput& output) {
  if (input.rows > 0) DrawRun(input, output).run();
}

}  // namespace banyan::kernels
