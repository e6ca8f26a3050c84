// AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers. With BF16 units products take bfloat16 inputs, otherwise float32 ones.
#pragma once
#include <immintrin.h>

namespace mtp {

constexpr int LANES = 16;
constexpr int SUM_REGISTERS = 24;

struct Floats {
  __m512 v;
};

// Stops the compiler from moving x to memory or to another place in the program.
inline Floats in_register(Floats x) {
  asm volatile("" : "+v"(x.v));
  return x;
}
inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats set(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
inline Floats load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
// The first n < LANES numbers, and zeros.
inline Floats load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline Floats load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline void store(float* p, Floats x, int n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
// Round to nearest, ties to even; NaN stays NaN. (vcvtneps2bf16 is not used: it flushes subnormal numbers.)
inline __m256i narrow(Floats x) {
  __m512i u = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i nan = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), nan));
}
inline void store(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store(bf16* p, Floats x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Floats scale_by_power_of_two(Floats x, Floats n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Of pairs of bfloat16 numbers, as loaded: the first of each, and the second.
inline Floats even(Floats pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs.v), 16))}; }
inline Floats odd(Floats pairs) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs.v), _mm512_set1_epi32(0xffff0000)))};
}
// x[i] lane j ↔ x[j] lane i
inline void transpose(Floats (&x)[LANES]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm512_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; j++) {
      a[i + j] = _mm512_shuffle_f32x4(b[i + j], b[i + j + 4], 0x88);
      a[i + j + 4] = _mm512_shuffle_f32x4(b[i + j], b[i + j + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; i++) {
    x[i].v = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    x[i + 8].v = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
}
inline float sum(Floats a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max(Floats a) { return _mm512_reduce_max_ps(a.v); }

// A truth for each lane. Comparisons with NaN are false.
struct Mask {
  __mmask16 v;
};

inline Mask at_least(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask either_nan(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask operator|(Mask a, Mask b) { return {__mmask16(a.v | b.v)}; }
inline uint32_t bits(Mask a) { return a.v; }  // bit i: lane i

struct Fp32 {
  using Stored = float;
  using X = float;
  static constexpr int STEP = 1, PARTS = 1;
  static constexpr bool SCALED = false;
  static Floats none() { return zero(); }
  static __m512 load(const float* p, int) { return _mm512_loadu_ps(p); }
  static __m512 broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static Floats step(Floats sum, __m512 w, __m512 x) { return {_mm512_fmadd_ps(w, x, sum.v)}; }
};

#ifdef __AVX512BF16__
struct Bf16 {
  using Stored = bf16;
  using X = bf16;
  static constexpr int STEP = 2, PARTS = 1;
  static constexpr bool SCALED = false;
  static Floats none() { return zero(); }
  static __m512bh load(const bf16* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh broadcast(const bf16* x) {
    int pair;
    std::memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Floats step(Floats sum, __m512bh w, __m512bh x) { return {_mm512_dpbf16_ps(sum.v, w, x)}; }
};
#else
struct Bf16 {
  using Stored = bf16;
  using X = float;
  static constexpr int STEP = 2, PARTS = 2;
  static constexpr bool SCALED = false;
  static Floats none() { return zero(); }
  // Pairs of inputs lie beside each other: the lower half of each 32 bits is the even one's weight.
  static __m512 load(const bf16* p, int part) {
    __m512i pairs = _mm512_loadu_si512(p);
    return _mm512_castsi512_ps(part ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(pairs, 16));
  }
  static __m512 broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static Floats step(Floats sum, __m512 w, __m512 x) { return {_mm512_fmadd_ps(w, x, sum.v)}; }
};
#endif

struct Ints {
  __m512i v;
};
inline Ints in_register(Ints x) {
  asm volatile("" : "+v"(x.v));
  return x;
}
inline Floats to_floats(Ints x, int32_t offset) { return {_mm512_cvtepi32_ps(_mm512_add_epi32(x.v, _mm512_set1_epi32(offset)))}; }

#ifdef __AVX512VNNI__
// vpdpbusd takes one operand without a sign: weights are read as w + 128, and 128 times the sum of the inputs is taken off at the end.
struct Int8 {
  using Stored = int8_t;
  using X = int8_t;
  static constexpr int STEP = 4, PARTS = 1, OFFSET = -128;
  static constexpr bool SCALED = true;
  static Ints none() { return {_mm512_setzero_si512()}; }
  static __m512i load(const int8_t* p, int) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128)); }
  static __m512i broadcast(const int8_t* x) {
    int four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }
  static Ints step(Ints sum, __m512i w, __m512i x) { return {_mm512_dpbusd_epi32(sum.v, w, x)}; }
  static void store(int8_t* to, Floats whole) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole.v))); }
};
#else
// Widened to 16 bits in registers, since a product of 8 bits by 8 (vpmaddubsw) can saturate: four inputs are b0 … b3 of 32 bits, of which
// the first part multiplies b0 and b2, and the second b1 and b3.
struct Int8 {
  using Stored = int8_t;
  using X = int16_t;  // in the order 0, 2, 1, 3
  static constexpr int STEP = 4, PARTS = 2, OFFSET = 0;
  static constexpr bool SCALED = true;
  static Ints none() { return {_mm512_setzero_si512()}; }
  static __m512i load(const int8_t* p, int part) {
    __m512i fours = _mm512_loadu_si512(p);
    return _mm512_srai_epi16(part ? fours : _mm512_slli_epi16(fours, 8), 8);
  }
  static __m512i broadcast(const int16_t* x) {
    int pair;
    std::memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
  }
  static Ints step(Ints sum, __m512i w, __m512i x) { return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(w, x))}; }
  static void store(int16_t* to, Floats whole) {
    __m256i x = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole.v));
    x = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i*)to, x);
  }
};
#endif

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the L2 cache
inline void pause() { _mm_pause(); }

}  // namespace mtp
