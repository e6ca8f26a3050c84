// AVX-512 for a CPU without it: SIMDe's functions under the names of the intrinsics, and those that it lacks. What neither has does not
// compile. Included before everything else. EMULATE_VNNI adds the int8 products, EMULATE_BF16 the bf16 products, EMULATE_AMX the tiles.
#pragma once
#include <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

#define __AVX512F__ 1

namespace emulated {

inline __m512 shuffle_quarters(__m512 a, __m512 b, int order) {
  float to[16];
  for (int i = 0; i < 4; i++) std::memcpy(to + 4 * i, (const float*)(i < 2 ? &a : &b) + 4 * (order >> 2 * i & 3), 16);
  __m512 made;
  std::memcpy(&made, to, 64);
  return made;
}

// SIMDe's name for this one takes the arguments of another.
inline __m512i multiply_add(__m512i x, __m512i y) {
  __m256i a[2], b[2];
  std::memcpy(a, &x, 64), std::memcpy(b, &y, 64);
  for (int i = 0; i < 2; i++) a[i] = _mm256_madd_epi16(a[i], b[i]);
  std::memcpy(&x, a, 64);
  return x;
}

// Halves are joined until one number is left.
template <class Join> inline float reduce(__m512 x, Join join) {
  float p[16];
  std::memcpy(p, &x, 64);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) p[i] = join(p[i], p[i + half]);
  return p[0];
}

// The instruction adds the odd product first, each with one rounding.
inline __m512 dot_bf16(__m512 sum, __m512bh a, __m512bh b) {
  __m256i x[2], y[2];
  __m256 s[2];
  std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(s, &sum, 64);
  const __m256i high = _mm256_set1_epi32(0xffff0000);
  for (int i = 0; i < 2; i++) {
    s[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x[i], high)), _mm256_castsi256_ps(_mm256_and_si256(y[i], high)), s[i]);
    s[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x[i], 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y[i], 16)), s[i]);
  }
  std::memcpy(&sum, s, 64);
  return sum;
}

}  // namespace emulated

#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) emulated::multiply_add(a, b)
#define _mm512_shuffle_f32x4(a, b, order) emulated::shuffle_quarters(a, b, order)
#define _mm512_reduce_add_ps(x) emulated::reduce(x, [](float a, float b) { return a + b; })
#define _mm512_reduce_max_ps(x) emulated::reduce(x, [](float a, float b) { return a > b ? a : b; })

#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef EMULATE_BF16
#define __AVX512BF16__ 1
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot_bf16(sum, a, b)
#endif

#ifdef EMULATE_AMX
#include "amx.h"
#endif
