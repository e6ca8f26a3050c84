// AVX2 and FMA: 8 lanes, 16 registers. Weights in bfloat16 are widened in registers, inputs before.
#pragma once
#include <immintrin.h>

namespace mtp {

constexpr int LANES = 8;
constexpr int SUM_REGISTERS = 12;  // of the 16; the others hold weights and inputs

struct Floats {
  __m256 v;
};

// Stops the compiler from moving x to memory or to another place in the program.
inline Floats in_register(Floats x) {
  asm volatile("" : "+x"(x.v));
  return x;
}
inline Floats zero() { return {_mm256_setzero_ps()}; }
inline Floats set(float x) { return {_mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Floats load(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
}
inline __m256i first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
// The first n < LANES numbers, and zeros.
inline Floats load(const float* p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
inline Floats load(const bf16* p, int n) {
  bf16 part[LANES] = {};
  std::memcpy(part, p, n * sizeof(bf16));
  return load(part);
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.v); }
inline void store(float* p, Floats x, int n) { _mm256_maskstore_ps(p, first(n), x.v); }
// Round to nearest, ties to even; NaN stays NaN.
inline __m128i narrow(Floats x) {
  __m256i u = _mm256_castps_si256(x.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  rounded = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline void store(bf16* p, Floats x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
inline void store(bf16* p, Floats x, int n) {
  bf16 part[LANES];
  store(part, x);
  std::memcpy(p, part, n * sizeof(bf16));
}
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
inline Floats round(Floats a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x 2^n for whole n from -150 to 127; in two steps, so that the smallest results are subnormal numbers and then 0.
inline Floats scale_by_power_of_two(Floats x, Floats n) {
  __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  auto power = [](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23)); };
  return {_mm256_mul_ps(_mm256_mul_ps(x.v, power(half)), power(rest))};
}
// Of pairs of bfloat16 numbers, as loaded: the first of each, and the second.
inline Floats even(Floats pairs) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.v), 16))}; }
inline Floats odd(Floats pairs) {
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs.v), _mm256_set1_epi32(0xffff0000)))};
}
// x[i] lane j ↔ x[j] lane i
inline void transpose(Floats (&x)[LANES]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  }
  for (int i = 0; i < 4; i++) {
    x[i].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    x[i + 4].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}
inline float sum(Floats a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max(Floats a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// A truth for each lane. Comparisons with NaN are false.
struct Mask {
  __m256 v;
};

inline Mask at_least(Floats a, Floats b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask either_nan(Floats a, Floats b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.v, b.v)}; }
inline uint32_t bits(Mask a) { return (uint32_t)_mm256_movemask_ps(a.v); }  // bit i: lane i

struct Fp32 {
  using Stored = float;
  using X = float;
  static constexpr int STEP = 1, PARTS = 1;
  static constexpr bool SCALED = false;
  static Floats none() { return zero(); }
  static __m256 broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static __m256 load(const float* p, int) { return _mm256_loadu_ps(p); }
  static Floats step(Floats sum, __m256 w, __m256 x) { return {_mm256_fmadd_ps(w, x, sum.v)}; }
};

struct Bf16 {
  using Stored = bf16;
  using X = float;
  static constexpr int STEP = 2, PARTS = 2;
  static constexpr bool SCALED = false;
  static Floats none() { return zero(); }
  static __m256 broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  // Pairs of inputs lie beside each other: the lower half of each 32 bits is the even one's weight.
  static __m256 load(const bf16* p, int part) {
    __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    return _mm256_castsi256_ps(part ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(pairs, 16));
  }
  static Floats step(Floats sum, __m256 w, __m256 x) { return {_mm256_fmadd_ps(w, x, sum.v)}; }
};

struct Ints {
  __m256i v;
};
inline Ints in_register(Ints x) {
  asm volatile("" : "+x"(x.v));
  return x;
}
inline Floats to_floats(Ints x, int32_t) { return {_mm256_cvtepi32_ps(x.v)}; }

// Widened to 16 bits in registers, since a product of 8 bits by 8 (vpmaddubsw) can saturate: four inputs are b0 … b3 of 32 bits, of which
// the first part multiplies b0 and b2, and the second b1 and b3.
struct Int8 {
  using Stored = int8_t;
  using X = int16_t;  // in the order 0, 2, 1, 3
  static constexpr int STEP = 4, PARTS = 2, OFFSET = 0;
  static constexpr bool SCALED = true;
  static Ints none() { return {_mm256_setzero_si256()}; }
  static __m256i load(const int8_t* p, int part) {
    __m256i fours = _mm256_loadu_si256((const __m256i*)p);
    return _mm256_srai_epi16(part ? fours : _mm256_slli_epi16(fours, 8), 8);
  }
  static __m256i broadcast(const int16_t* x) { return _mm256_castps_si256(_mm256_broadcast_ss((const float*)x)); }
  static Ints step(Ints sum, __m256i w, __m256i x) { return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(w, x))}; }
  static void store(int16_t* to, Floats whole) {
    __m256i wide = _mm256_cvtps_epi32(whole.v);
    __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storeu_si128((__m128i*)to, _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the L2 cache
inline void pause() { _mm_pause(); }

}  // namespace mtp
