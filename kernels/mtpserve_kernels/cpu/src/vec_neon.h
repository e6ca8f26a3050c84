// ARM NEON, with or without its units for bfloat16: vec.h.
#pragma once
#include <arm_neon.h>

namespace mtp {
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }  // vmaxq_f32(a, b) is NaN where one is
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }  // a b + c
inline Floats round(Floats a) { return vrndnq_f32(a); }

inline float sum(Floats a) { return vaddvq_f32(a); }
inline float max(Floats a) { return vmaxvq_f32(a); }
inline uint32_t bits(Ints truths) {  // bit i: lane i
  const Ints weights = {1, 2, 4, 8};
  return (uint32_t)vaddvq_s32(truths & weights);
}

inline Floats low(Floats a, Floats b) { return vzip1q_f32(a, b); }  // a0 b0 a1 b1
inline Floats high(Floats a, Floats b) { return vzip2q_f32(a, b); }
inline void quarters(Floats (&)[LANES]) {}  // there is one

inline Ints dot_int16(Ints a, Ints b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_s16(vget_high_s16(x), vget_high_s16(y)));
}
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define BF16_UNITS
inline Floats dot_bf16(Floats sum, Ints a, Ints b) { return vbfdotq_f32(sum, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b)); }
#endif
inline void pause() { asm volatile("yield"); }
}  // namespace mtp
