// AVX-512 (F, BW, DQ, VL), with or without its units for bfloat16 and int8: vec.h.
#pragma once
#include <immintrin.h>

namespace mtp {
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
inline Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
inline float max(Floats a) { return _mm512_reduce_max_ps(a); }
inline uint32_t bits(Ints truths) { return _mm512_movepi32_mask((__m512i)truths); }  // bit i: lane i

inline Floats low(Floats a, Floats b) { return _mm512_unpacklo_ps(a, b); }  // of each quarter (four lanes): a0 b0 a1 b1
inline Floats high(Floats a, Floats b) { return _mm512_unpackhi_ps(a, b); }
// x[4 i + r] quarter j ↔ x[4 j + r] quarter i
inline void quarters(Floats (&x)[LANES]) {
  for (int r = 0; r < 4; r++) {
    const Floats a = _mm512_shuffle_f32x4(x[r], x[4 + r], 0x44), b = _mm512_shuffle_f32x4(x[8 + r], x[12 + r], 0x44);
    const Floats c = _mm512_shuffle_f32x4(x[r], x[4 + r], 0xee), d = _mm512_shuffle_f32x4(x[8 + r], x[12 + r], 0xee);
    x[r] = _mm512_shuffle_f32x4(a, b, 0x88), x[4 + r] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[8 + r] = _mm512_shuffle_f32x4(c, d, 0x88), x[12 + r] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

inline Ints dot_int16(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#ifdef __AVX512BF16__
#define BF16_UNITS
inline Floats dot_bf16(Floats sum, Ints a, Ints b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif
#ifdef __AVX512VNNI__
#define INT8_UNITS
inline Ints dot_int8(Ints sum, Ints a, Ints b) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
#endif
inline void pause() { _mm_pause(); }
}  // namespace mtp
