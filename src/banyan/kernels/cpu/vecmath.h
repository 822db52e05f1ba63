// Branch-free fp32 functions that the compiler vectorises inside BANYAN_MULTIVERSION loops, and the
// bf16 conversions. Every multiply-add is an explicit fma, so a value has the same bits in the
// vector body of a loop, in its scalar tail, and under every instruction set.
//
// exp: x = n ln2 + r, |r| <= ln2 / 2, e^r by the degree-7 polynomial of Cephes expf (S. Moshier),
// then 2^n by exponent bits. log: x = m 2^e with m in [sqrt(1/2), sqrt(2)), polynomial of Cephes
// logf. Both stay within 2 ulp (vecmath_test). NaN goes through.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "banyan/kernels/cpu/multiversion.h"

namespace banyan::kernels {

BANYAN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// e^x; 0 below -87 (no denormals), +inf above 88.73.
BANYAN_INLINE float exp_f32(float x) {
  constexpr float kShift =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  float clamped = x < -88.0f ? -88.0f : x;
  clamped = clamped > 89.0f ? 89.0f : clamped;
  const float shifted = fma(clamped, 1.44269504088896341f, kShift);
  const float n = shifted - kShift;
  float r = fma(n, -0.693147182464599609375f, clamped);
  r = fma(n, 1.904654299957767878541823e-9f, r);
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  // Half the scale in the exponent bits (n - 1 <= 127), the other factor of two afterwards.
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kShift) + 126;
  const float scale = std::bit_cast<float>((exponent < 0 ? 0 : exponent) << 23);
  return p * scale * 2.0f;
}

// Natural logarithm of a positive normal number; log(0) = -inf, log(+inf) = +inf, x < 0 gives NaN.
BANYAN_INLINE float log_f32(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  int32_t exponent = (bits >> 23) - 126;
  float m = std::bit_cast<float>((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const bool small = m < 0.707106781186547524f;
  exponent = small ? exponent - 1 : exponent;
  m = small ? (m - 0.5f) + (m - 0.5f) : m - 1.0f;
  const float e = static_cast<float>(exponent);
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = fma(p, m, -1.1514610310e-1f);
  p = fma(p, m, 1.1676998740e-1f);
  p = fma(p, m, -1.2420140846e-1f);
  p = fma(p, m, 1.4249322787e-1f);
  p = fma(p, m, -1.6668057665e-1f);
  p = fma(p, m, 2.0000714765e-1f);
  p = fma(p, m, -2.4999993993e-1f);
  p = fma(p, m, 3.3333331174e-1f);
  float y = p * m * z;
  y = fma(e, -2.12194440e-4f, y);
  y = fma(z, -0.5f, y);
  float result = fma(e, 0.693359375f, m + y);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  result = x == 0.0f ? -kInf : result;
  result = x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : result;
  return x < kInf ? result : x;  // +inf and NaN
}

// 1 / (1 + e^-x)
BANYAN_INLINE float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// bf16 as its 16 bits.
BANYAN_INLINE float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; NaN stays NaN.
BANYAN_INLINE uint16_t f32_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

}  // namespace banyan::kernels
