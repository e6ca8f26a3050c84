// ARM NEON: 4 lanes, 32 registers. With BF16 units products take bfloat16 inputs, otherwise float32 ones.
#pragma once
#include <arm_neon.h>

namespace mtp {

constexpr int LANES = 4;
constexpr int SUM_REGISTERS = 24;  // of the 32; the others hold weights and inputs

struct Floats {
  float32x4_t v;
};

inline Floats zero() { return {vdupq_n_f32(0)}; }
inline Floats set(float x) { return {vdupq_n_f32(x)}; }
inline Floats load(const float* p) { return {vld1q_f32(p)}; }
inline Floats load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p), 16))}; }
// The first n < LANES numbers, and zeros.
template <class T> inline Floats load(const T* p, int n) {
  T part[LANES] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}
inline void store(float* p, Floats x) { vst1q_f32(p, x.v); }
// Round to nearest, ties to even; NaN stays NaN. (vcvt_bf16_f32 is not used: not every machine has it, and the bits are to be the same.)
inline uint16x4_t narrow(Floats x) {
  uint32x4_t u = vreinterpretq_u32_f32(x.v), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  uint32x4_t nan = vorrq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(0x40));
  return vmovn_u32(vbslq_u32(vceqq_f32(x.v, x.v), rounded, nan));
}
inline void store(bf16* p, Floats x) { vst1_u16((uint16_t*)p, narrow(x)); }
template <class T> inline void store(T* p, Floats x, int n) {
  T part[LANES];
  store(part, x);
  std::memcpy(p, part, n * sizeof(T));
}
inline Floats add(Floats a, Floats b) { return {vaddq_f32(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {vsubq_f32(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {vmulq_f32(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {vdivq_f32(a.v, b.v)}; }
// NaN in b stays NaN, as on x86.
inline Floats max(Floats a, Floats b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.v, a.v, b.v)}; }   // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return {vfmsq_f32(c.v, a.v, b.v)}; }  // c - a b
inline Floats round(Floats a) { return {vrndnq_f32(a.v)}; }
// x 2^n for whole n from -150 to 127; in two steps, so that the smallest results are subnormal numbers and then 0.
inline Floats scale_by_power_of_two(Floats x, Floats n) {
  int32x4_t whole = vcvtq_s32_f32(n.v), half = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, half);
  auto power = [](int32x4_t e) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)); };
  return {vmulq_f32(vmulq_f32(x.v, power(half)), power(rest))};
}
// Of pairs of bfloat16 numbers, as loaded: the first of each, and the second.
inline Floats even(Floats pairs) { return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs.v), 16))}; }
inline Floats odd(Floats pairs) { return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs.v), vdupq_n_u32(0xffff0000)))}; }
// x[i] lane j ↔ x[j] lane i
inline void transpose(Floats (&x)[LANES]) {
  const float32x4x2_t a = vtrnq_f32(x[0].v, x[1].v), b = vtrnq_f32(x[2].v, x[3].v);
  for (int i = 0; i < 2; i++) {
    x[i].v = vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i]));
    x[i + 2].v = vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i]));
  }
}

// A truth for each lane. Comparisons with NaN are false.
struct Mask {
  uint32x4_t v;
};

inline Mask at_least(Floats a, Floats b) { return {vcgeq_f32(a.v, b.v)}; }
inline Mask either_nan(Floats a, Floats b) { return {vmvnq_u32(vandq_u32(vceqq_f32(a.v, a.v), vceqq_f32(b.v, b.v)))}; }
inline Mask operator|(Mask a, Mask b) { return {vorrq_u32(a.v, b.v)}; }
inline uint32_t bits(Mask a) {  // bit i: lane i
  const uint32x4_t weights = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(a.v, weights));
}

inline float sum(Floats a) { return vaddvq_f32(a.v); }
inline float max(Floats a) { return vmaxvq_f32(a.v); }

struct Fp32 {
  using Stored = float;
  using X = float;
  static constexpr int STEP = 1;  // inputs that are multiplied at once
  struct Weights {
    float32x4_t v;
  };
  static Weights load(const float* p) { return {vld1q_f32(p)}; }
  static Floats step(Floats sum, Weights w, const float* x) { return {vfmaq_n_f32(sum.v, w.v, *x)}; }
};

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
struct Bf16 {
  using Stored = bf16;
  using X = bf16;
  static constexpr int STEP = 2;
  struct Weights {
    bfloat16x8_t pairs;
  };
  static Weights load(const bf16* p) { return {vreinterpretq_bf16_u16(vld1q_u16((const uint16_t*)p))}; }
  static Floats step(Floats sum, Weights w, const bf16* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return {vbfdotq_f32(sum.v, w.pairs, vreinterpretq_bf16_u32(vdupq_n_u32(pair)))};
  }
};
#else
struct Bf16 {
  using Stored = bf16;
  using X = float;
  static constexpr int STEP = 2;
  struct Weights {
    float32x4_t even, odd;
  };
  // Pairs of inputs lie beside each other: the lower half of each 32 bits is the even one's weight.
  static Weights load(const bf16* p) {
    uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16((const uint16_t*)p));
    return {vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)), vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000)))};
  }
  static Floats step(Floats sum, Weights w, const float* x) { return {vfmaq_n_f32(vfmaq_n_f32(sum.v, w.even, x[0]), w.odd, x[1])}; }
};
#endif

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void pause() { asm volatile("yield"); }

}  // namespace mtp
