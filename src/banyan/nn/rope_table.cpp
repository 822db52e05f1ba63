#include "banyan/nn/rope_table.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "banyan/core/error.h"

namespace banyan::nn {
namespace {

constexpr int64_t kFirstPositions = 1024;

// theta^(2i / D)
at::Tensor wave_scale(const RopeOptions& options, int64_t head_dim) {
  const at::Tensor even = at::arange(0, head_dim, 2, at::kLong).to(at::kFloat);
  return at::pow(at::Scalar(options.theta), even.div(static_cast<double>(head_dim)));
}

// Wavelengths far beyond the trained length are stretched by `factor`, short ones kept, those
// between mixed (Llama 3.1).
at::Tensor llama3_frequencies(const RopeOptions& options, const at::Tensor& base) {
  const auto trained = static_cast<double>(options.original_max_positions);
  const at::Tensor wavelength = base.reciprocal().mul(2 * std::numbers::pi);
  const at::Tensor long_wave = wavelength.gt(trained / options.low_freq_factor);
  const at::Tensor short_wave = wavelength.lt(trained / options.high_freq_factor);
  const at::Tensor stretched = base.div(options.factor);
  const at::Tensor mix = wavelength.reciprocal()
                             .mul(trained)
                             .sub(options.low_freq_factor)
                             .div(options.high_freq_factor - options.low_freq_factor);
  const at::Tensor mixed = mix.neg().add(1.0).mul(base).div(options.factor).add(mix.mul(base));
  return at::where(long_wave, stretched, at::where(short_wave, base, mixed));
}

// Dimension whose wave turns `rotations` times within the trained length.
double yarn_dimension(const RopeOptions& options, int64_t head_dim, double rotations) {
  const auto trained = static_cast<double>(options.original_max_positions);
  return static_cast<double>(head_dim) * std::log(trained / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(options.theta));
}

// Peng et al., "YaRN", 2023: fast dimensions keep their frequency, slow ones are stretched, a ramp
// between.
at::Tensor yarn_frequencies(const RopeOptions& options, int64_t head_dim) {
  double low = yarn_dimension(options, head_dim, options.beta_fast);
  double high = yarn_dimension(options, head_dim, options.beta_slow);
  if (options.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;
  const at::Tensor scale = wave_scale(options, head_dim);
  const at::Tensor ramp =
      at::arange(head_dim / 2, at::kFloat).sub(low).div(high - low).clamp(0.0, 1.0);
  const at::Tensor keep = ramp.neg().add(1.0);
  const at::Tensor stretched = scale.mul(options.factor).reciprocal();
  return stretched.mul(keep.neg().add(1.0)).add(scale.reciprocal().mul(keep));
}

double yarn_scale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

}  // namespace

at::Tensor rope_frequencies(const RopeOptions& options, int64_t head_dim) {
  BANYAN_CHECK(
      head_dim >= 2 && head_dim % 2 == 0, "[rope] head_dim: wanted an even number, got ", head_dim);
  if (options.type == "yarn") return yarn_frequencies(options, head_dim);
  const at::Tensor base = wave_scale(options, head_dim).reciprocal();
  // Within the trained length the dynamic rule changes nothing; beyond it the table refuses.
  if (options.type == "default" || options.type == "dynamic") return base;
  if (options.type == "linear") return base.div(options.factor);
  BANYAN_CHECK(options.type == "llama3",
               "[rope] rope_type: wanted default, linear, dynamic, llama3 or yarn, got '",
               options.type,
               "'");
  return llama3_frequencies(options, base);
}

double rope_attention_factor(const RopeOptions& options) {
  if (options.type != "yarn") return 1.0;
  if (options.attention_factor) return *options.attention_factor;
  if (options.mscale && options.mscale_all_dim) {
    return yarn_scale(options.factor, *options.mscale) /
           yarn_scale(options.factor, *options.mscale_all_dim);
  }
  return yarn_scale(options.factor, 1.0);
}

RopeTable::RopeTable(const RopeOptions& options,
                     int64_t head_dim,
                     int64_t max_positions,
                     const ComputeOptions& compute)
    : options_(options),
      compute_(compute),
      max_positions_(max_positions),
      frequencies_(rope_frequencies(options, head_dim)) {}

void RopeTable::reserve(int64_t num_positions) {
  const int64_t have = cos_.defined() ? cos_.size(0) : 0;
  if (num_positions <= have) return;
  BANYAN_CHECK(options_.type != "dynamic" || num_positions <= max_positions_,
               "[rope] position: wanted < ",
               max_positions_,
               " (the trained length; dynamic scaling past it is not "
               "supported), got ",
               num_positions - 1);
  int64_t rows = std::max({num_positions, 2 * have, kFirstPositions});
  if (num_positions <= max_positions_) rows = std::min(rows, max_positions_);
  const at::Tensor positions = at::arange(rows, at::kLong).to(at::kFloat);
  const at::Tensor angle = positions.unsqueeze(1).mul(frequencies_.unsqueeze(0));
  const double scale = rope_attention_factor(options_);
  const auto dtype = compute_.dtype == at::kDouble ? at::kDouble : at::kFloat;
  cos_ = angle.cos().mul(scale).to(compute_.device, dtype);
  sin_ = angle.sin().mul(scale).to(compute_.device, dtype);
}

}  // namespace banyan::nn
