// Inverse transform sampling: draw k takes the first row whose cumulated weight exceeds a uniform
// number keyed by (seed, step, k).
#include "banyan/algo/resample.h"

#include <algorithm>
#include <cmath>

#include "banyan/core/error.h"
#include "banyan/core/rng.h"

namespace banyan::algo {
namespace {

constexpr double kFloor = 1e-8;
constexpr uint64_t kPurpose = 0x70665f70706f;  // "pf_ppo": apart from the draws of others

double weight_of(double score, double low, double high, const ResampleOptions& options) {
  if (options.reweight_method == "pow") return std::pow(std::abs(score), options.weight_pow);
  if (options.reweight_method == "max_min") return score == high || score == low ? 1.0 : 0.0;
  return score == high ? 0.4 : 0.1;
}

// Uniform in [0, 1) with 53 random bits.
double uniform53(uint64_t seed, uint64_t step, uint64_t draw) {
  const auto words = philox(seed ^ kPurpose, draw, step);
  const uint64_t bits = uint64_t{words[0]} | (uint64_t{words[1]} << 32);
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

}  // namespace

void check_resample_options(const ResampleOptions& options) {
  const std::string& method = options.reweight_method;
  BANYAN_CHECK(method == "pow" || method == "max_min" || method == "max_random",
               "[algorithm.pf_ppo.reweight_method] wanted pow, max_min or max_random, got '",
               method,
               "'");
  BANYAN_CHECK(std::isfinite(options.weight_pow),
               "[algorithm.pf_ppo.weight_pow] wanted a finite number, got ",
               options.weight_pow);
}

std::vector<int64_t> resample(const std::vector<double>& score,
                              const std::vector<uint8_t>& valid,
                              const ResampleOptions& options,
                              uint64_t seed,
                              uint64_t step) {
  check_resample_options(options);
  std::vector<int64_t> rows;
  for (size_t i = 0; i < score.size(); ++i) {
    if (valid[i]) rows.push_back(static_cast<int64_t>(i));
  }
  if (rows.empty()) return rows;
  double low = score[rows[0]], high = low;
  for (const int64_t i : rows) {
    low = std::min(low, score[i]);
    high = std::max(high, score[i]);
  }
  std::vector<double> cumulated;
  double sum = 0.0;
  for (const int64_t i : rows) {
    sum += kFloor + weight_of(score[i], low, high, options);
    cumulated.push_back(sum);
  }
  std::vector<int64_t> drawn;
  for (size_t k = 0; k < rows.size(); ++k) {
    const double point = uniform53(seed, step, k) * sum;
    const auto place = std::upper_bound(cumulated.begin(), cumulated.end() - 1, point);
    drawn.push_back(rows[place - cumulated.begin()]);
  }
  return drawn;
}

}  // namespace banyan::algo
