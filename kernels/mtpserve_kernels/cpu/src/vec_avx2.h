// AVX2 and FMA: vec.h.
#pragma once
#include <immintrin.h>

namespace mtp {
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }  // a b + c
inline Floats round(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline float sum(Floats a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max(Floats a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline uint32_t bits(Ints truths) { return (uint32_t)_mm256_movemask_ps((Floats)truths); }  // bit i: lane i

inline Floats low(Floats a, Floats b) { return _mm256_unpacklo_ps(a, b); }  // of each quarter (four lanes): a0 b0 a1 b1
inline Floats high(Floats a, Floats b) { return _mm256_unpackhi_ps(a, b); }
// x[4 i + r] quarter j ↔ x[4 j + r] quarter i
inline void quarters(Floats (&x)[LANES]) {
  for (int r = 0; r < 4; r++) {
    const Floats a = x[r], b = x[4 + r];
    x[r] = _mm256_permute2f128_ps(a, b, 0x20), x[4 + r] = _mm256_permute2f128_ps(a, b, 0x31);
  }
}

inline Ints dot_int16(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline void pause() { _mm_pause(); }
}  // namespace mtp
