// The steps in registers have the bits of the separate steps, and both are right.
#include "banyan/kernels/cpu/attention_gradient_tile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "banyan/kernels/cpu/attention_tile.h"
#include "banyan/kernels/cpu/scratch.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

struct Case {
  int64_t dim, rows, keys, first_seen;
};

std::vector<const uint16_t*> row_pointers(const std::vector<uint16_t>& x, int64_t n, int64_t dim) {
  std::vector<const uint16_t*> rows;
  for (int64_t i = 0; i < n; ++i) rows.push_back(x.data() + i * dim);
  return rows;
}

class Tile {
 public:
  explicit Tile(const Case& c) : case_(c), random_(c.dim + c.rows + c.keys) {
    q_ = draw(c.rows);
    grad_ = draw(c.rows);
    k_ = draw(c.keys);
    v_ = draw(c.keys);
    for (int64_t i = 0; i < kTileTokens; ++i) {
      lse_.push_back(2.0f + normal_(random_));
      delta_.push_back(normal_(random_));
    }
  }

  // dK and dV, twice the sums and 0.5 more, and dQ, twice the sums.
  std::vector<std::vector<float>> gradients(bool fused) const {
    const int64_t dim = case_.dim;
    GradientTile tile{.head_dim = dim,
                      .scale = kScale,
                      .rows = case_.rows,
                      .q = q_.data(),
                      .q_stride = dim,
                      .grad_out = grad_.data(),
                      .grad_stride = dim,
                      .lse = lse_.data(),
                      .delta = delta_.data(),
                      .keys = case_.keys,
                      .first_seen = case_.first_seen,
                      .fused = fused};
    const std::vector<uint16_t> q_pairs = pairs(q_, case_.rows);
    const std::vector<uint16_t> grad_pairs = pairs(grad_, case_.rows);
    const std::vector<uint16_t> key_pairs = pairs(k_, case_.keys);
    const std::vector<uint16_t> key_columns = columns(k_);
    const std::vector<uint16_t> value_columns = columns(v_);
    tile.q_pairs = q_pairs.data();
    tile.grad_pairs = grad_pairs.data();
    tile.key_pairs = key_pairs.data();
    tile.key_columns = key_columns.data();
    tile.value_columns = value_columns.data();
    Carver count(nullptr);
    carve_gradient_scratch(count, dim);
    Scratch memory;
    std::byte* bytes = memory.get<std::byte>(count.used());
    std::fill_n(bytes, count.used(), std::byte{0xff});  // NaN of an earlier owner
    Carver carver(bytes);
    const GradientScratch scratch = carve_gradient_scratch(carver, dim);
    std::vector<float> dk(kTileTokens * dim, 0.5f);
    std::vector<float> dv(kTileTokens * dim, 0.5f);
    std::vector<float> dq(case_.rows * dim, std::numeric_limits<float>::quiet_NaN());
    for (const bool add : {false, true}) {
      key_gradients(tile, scratch, dk.data(), dv.data());
      query_gradients(tile, scratch, add, dq.data());
    }
    dk.resize(case_.keys * dim);
    dv.resize(case_.keys * dim);
    return {dk, dv, dq};
  }

  std::vector<std::vector<double>> gradients_in_double() const {
    const int64_t dim = case_.dim;
    std::vector<double> dk(case_.keys * dim, 0.5);
    std::vector<double> dv(case_.keys * dim, 0.5);
    std::vector<double> dq(case_.rows * dim, 0.0);
    for (int64_t i = 0; i < case_.rows; ++i) {
      for (int64_t j = 0; j < std::min(case_.keys, case_.first_seen + i); ++j) {
        double s = 0.0;
        double dp = 0.0;
        for (int64_t d = 0; d < dim; ++d) {
          s += number(q_, i * dim + d) * number(k_, j * dim + d);
          dp += number(grad_, i * dim + d) * number(v_, j * dim + d);
        }
        const double p = std::exp(kScale * s - lse_[i]);
        const double ds = p * (dp - delta_[i]);
        for (int64_t d = 0; d < dim; ++d) {
          dv[j * dim + d] += 2 * p * number(grad_, i * dim + d);
          dk[j * dim + d] += 2 * ds * number(q_, i * dim + d);
          dq[i * dim + d] += 2 * ds * number(k_, j * dim + d);
        }
      }
    }
    return {dk, dv, dq};
  }

 private:
  static constexpr float kScale = 0.125f;
  static double number(const std::vector<uint16_t>& x, int64_t i) { return bf16_to_f32(x[i]); }

  std::vector<uint16_t> draw(int64_t rows) {
    std::vector<uint16_t> x(rows * case_.dim);
    for (uint16_t& value : x) value = f32_to_bf16(normal_(random_));
    return x;
  }
  std::vector<uint16_t> pairs(const std::vector<uint16_t>& x, int64_t n) const {
    const int64_t width = round_up(n, kRowStep);
    std::vector<uint16_t> out(width * case_.dim);
    pack_pairs(row_pointers(x, n, case_.dim).data(), n, width, case_.dim, out.data());
    return out;
  }
  std::vector<uint16_t> columns(const std::vector<uint16_t>& x) const {
    const int64_t width = round_up(case_.keys, kRowStep);
    std::vector<uint16_t> out(width * case_.dim);
    pack_columns(
        row_pointers(x, case_.keys, case_.dim).data(), case_.keys, width, case_.dim, out.data());
    return out;
  }

  Case case_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<uint16_t> q_, grad_, k_, v_;
  std::vector<float> lse_, delta_;
};

TEST(AttentionGradientTile, RegistersHaveTheBitsOfTheSeparateSteps) {
  for (const int64_t dim : {16, 64, 80}) {
    for (const Case& c : std::vector<Case>{{dim, 64, 64, 1},
                                           {dim, 64, 64, 64},
                                           {dim, 64, 36, 65},
                                           {dim, 1, 1, 1},
                                           {dim, 5, 64, 60},
                                           {dim, 37, 50, 3},
                                           {dim, 37, 50, 14},
                                           {dim, 20, 7, 1},
                                           {dim, 21, 40, -9}}) {
      const Tile tile(c);
      const auto wanted = tile.gradients(/*fused=*/false);
      const auto got = tile.gradients(/*fused=*/true);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_EQ(got[i], wanted[i])
            << i << ": " << dim << ' ' << c.rows << ' ' << c.keys << ' ' << c.first_seen;
      }
    }
  }
}

TEST(AttentionGradientTile, EqualsSumsInDouble) {
  for (const Case& c : std::vector<Case>{{16, 11, 9, 2}, {64, 64, 64, 1}, {64, 30, 17, 40}}) {
    const Tile tile(c);
    const auto wanted = tile.gradients_in_double();
    for (const bool fused : {false, true}) {
      const auto got = tile.gradients(fused);
      for (size_t i = 0; i < wanted.size(); ++i) {
        double error = 0.0;
        double size = 0.0;
        for (size_t j = 0; j < wanted[i].size(); ++j) {
          error += std::pow(got[i][j] - wanted[i][j], 2);
          size += std::pow(wanted[i][j], 2);
        }
        EXPECT_LE(std::sqrt(error / size), 4e-3) << i << ": " << c.rows << " fused " << fused;
      }
    }
  }
}

}  // namespace
}  // namespace banyan::kernels
