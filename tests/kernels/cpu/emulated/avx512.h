// AVX-512 for a CPU without it: SIMDe's functions under the names of the intrinsics, and those that it lacks. What neither has does not
// compile. Included before everything else. EMULATE_BF16 adds the bf16 products, EMULATE_AMX the tiles.
#pragma once
#include <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

#define __AVX512F__ 1

namespace emulated {

template <class T, class Vector> inline void mask_store(void* p, uint64_t mask, Vector x) {
  for (size_t i = 0; i < sizeof(x) / sizeof(T); i++)
    if (mask >> i & 1) std::memcpy((T*)p + i, (const T*)&x + i, sizeof(T));
}

// As the instruction, it does not touch what is masked off.
template <class T, class Vector> inline Vector mask_load(uint64_t mask, const void* p) {
  T to[sizeof(Vector) / sizeof(T)] = {};
  for (size_t i = 0; i < sizeof(Vector) / sizeof(T); i++)
    if (mask >> i & 1) std::memcpy(to + i, (const T*)p + i, sizeof(T));
  Vector made;
  std::memcpy(&made, to, sizeof(to));
  return made;
}

// Each number of x as another type.
template <class To, class ToVector, class From, class Vector> inline ToVector convert(Vector x) {
  From from[sizeof(x) / sizeof(From)];
  To to[sizeof(x) / sizeof(From)];
  static_assert(sizeof(to) == sizeof(ToVector));
  std::memcpy(from, &x, sizeof(x));
  for (size_t i = 0; i < sizeof(x) / sizeof(From); i++) to[i] = To(from[i]);
  ToVector made;
  std::memcpy(&made, to, sizeof(to));
  return made;
}

// To the nearest whole number, of two the even one.
inline __m512i whole(__m512 x) {
  __m256 from[2];
  __m256i to[2];
  __m512i made;
  std::memcpy(from, &x, 64);
  for (int i = 0; i < 2; i++) to[i] = _mm256_cvtps_epi32(from[i]);
  std::memcpy(&made, to, 64);
  return made;
}

inline __m256 half(__m512 x, int i) { return _mm256_loadu_ps((const float*)&x + 8 * i); }

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

inline float reduce_max(__m512 x) {
  const float* p = (const float*)&x;
  float most = p[0];
  for (int i = 1; i < 16; i++) most = p[i] > most ? p[i] : most;
  return most;
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

#define _mm512_mask_storeu_ps(p, mask, x) emulated::mask_store<float>(p, mask, x)
#define _mm512_mask_storeu_epi32(p, mask, x) emulated::mask_store<int32_t>(p, mask, x)
#define _mm512_mask_storeu_epi16(p, mask, x) emulated::mask_store<int16_t>(p, mask, x)
#define _mm512_mask_storeu_epi8(p, mask, x) emulated::mask_store<int8_t>(p, mask, x)
#define _mm256_mask_storeu_epi16(p, mask, x) emulated::mask_store<int16_t>(p, mask, x)
#define _mm_mask_storeu_epi8(p, mask, x) emulated::mask_store<int8_t>(p, mask, x)
#undef _mm256_maskz_loadu_epi16
#define _mm512_maskz_loadu_ps(mask, p) (emulated::mask_load<float, __m512>(mask, p))
#define _mm512_maskz_loadu_epi32(mask, p) (emulated::mask_load<int32_t, __m512i>(mask, p))
#define _mm256_maskz_loadu_epi16(mask, p) (emulated::mask_load<int16_t, __m256i>(mask, p))
#define _mm_maskz_loadu_epi8(mask, p) (emulated::mask_load<int8_t, __m128i>(mask, p))
#define _mm512_cvtepi32_epi16(x) (emulated::convert<int16_t, __m256i, int32_t>(x))
#define _mm512_cvtepi32_epi8(x) (emulated::convert<int8_t, __m128i, int32_t>(x))
#define _mm512_cvtepu16_epi32(x) (emulated::convert<int32_t, __m512i, uint16_t>(x))
#define _mm512_cvtepi32_ps(x) (emulated::convert<float, __m512, int32_t>(x))
#define _mm512_cvtps_epi32(x) emulated::whole(x)
#define _mm512_extractf32x8_ps(x, i) emulated::half(x, i)
#define _mm512_shuffle_f32x4(a, b, order) emulated::shuffle_quarters(a, b, order)
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) emulated::multiply_add(a, b)
#define _mm512_reduce_max_ps(x) emulated::reduce_max(x)

#ifdef EMULATE_BF16
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot_bf16(sum, a, b)
#endif

#ifdef EMULATE_AMX
#include "amx.h"
#endif
