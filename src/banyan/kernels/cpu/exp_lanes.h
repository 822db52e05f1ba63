// exp_f32 of vecmath.h, bit for bit, for kernels written for AVX-512.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

// GCC 12's own intrinsics start from a register that is undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace banyan::kernels {

// e^x of sixteen x <= 89; NaN goes through.
__attribute__((always_inline, target("avx512f"))) inline __m512 exp_below(__m512 x) {
  const __m512 kShift = _mm512_set1_ps(12582912.0f);
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-88.0f), x);
  const __m512 shifted = _mm512_fmadd_ps(clamped, _mm512_set1_ps(1.44269504088896341f), kShift);
  const __m512 n = _mm512_sub_ps(shifted, kShift);
  __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693147182464599609375f), clamped);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(1.904654299957767878541823e-9f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  const __m512i shift_bits = _mm512_set1_epi32(0x4b400000 - 126);
  __m512i exponent = _mm512_sub_epi32(_mm512_castps_si512(shifted), shift_bits);
  exponent = _mm512_max_epi32(exponent, _mm512_setzero_si512());
  const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  const __m512 half = _mm512_mul_ps(p, scale);
  return _mm512_add_ps(half, half);
}

// e^x of any sixteen.
__attribute__((always_inline, target("avx512f"))) inline __m512 exp_lanes(__m512 x) {
  return exp_below(_mm512_min_ps(_mm512_set1_ps(89.0f), x));
}

}  // namespace banyan::kernels

#pragma GCC diagnostic pop

#endif
