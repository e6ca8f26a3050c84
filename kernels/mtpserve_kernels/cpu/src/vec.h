// Vectors of LANES numbers, and what is computed with them. What the compilers' own vectors can say
// (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html) is here, once; each instruction set's header has the rest:
//
//   max, min, fma, round     of each lane; max(a, b) and min(a, b) are b where one is NaN
//   sum, max, bits           of all lanes
//   low, high, quarters      for transpose
//   dot_int16                products of pairs; dot_bf16 and dot_int8, with BF16_UNITS and INT8_UNITS, where it has units for them
#pragma once
#include <utility>

#include "types.h"

namespace mtp {
#if defined(__AVX512F__)
#define PRIMITIVES "vec_avx512.h"
#define REGISTER "+v"
constexpr int LANES = 16, SUM_REGISTERS = 24;  // of 32; the others hold weights and inputs
#elif defined(__AVX2__)
#define PRIMITIVES "vec_avx2.h"
#define REGISTER "+x"
constexpr int LANES = 8, SUM_REGISTERS = 12;  // of 16
#elif defined(__ARM_NEON)
#define PRIMITIVES "vec_neon.h"
#define REGISTER "+w"
constexpr int LANES = 4, SUM_REGISTERS = 24;  // of 32
#else
#error "no vector primitives for this instruction set"
#endif

constexpr int PANEL = 16;  // outputs side by side: linear.h
constexpr int PANEL_VECTORS = PANEL / LANES;

using Floats [[gnu::vector_size(LANES * 4)]] = float;
using Ints [[gnu::vector_size(LANES * 4)]] = int32_t;  // of a comparison: -1 is true
using Bits [[gnu::vector_size(LANES * 4)]] = uint32_t;
using Int16s [[gnu::vector_size(LANES * 4)]] = int16_t;  // two a lane
using Halves [[gnu::vector_size(LANES * 2)]] = uint16_t;
using Bytes [[gnu::vector_size(LANES)]] = int8_t;
}  // namespace mtp

#include PRIMITIVES

namespace mtp {
template <class V> V read(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof(V));
  return x;
}
template <class V> void write(void* p, V x) { std::memcpy(p, &x, sizeof(V)); }

// Stops the compiler from moving x to memory or to another place in the program.
template <class V> V in_register(V x) {
#ifndef EMULATED
  asm volatile("" : REGISTER(x));
#endif
  return x;
}

inline Floats set(float x) { return x - Floats{}; }
inline Ints set(int32_t x) { return x + Ints{}; }
inline Ints at_least(Floats a, Floats b) { return a >= b; }
inline Ints either_nan(Floats a, Floats b) { return (a != a) | (b != b); }

// Of pairs of bfloat16 numbers, as loaded: the first of each, and the second.
inline Floats even(Floats pairs) { return (Floats)((Bits)pairs << 16); }
inline Floats odd(Floats pairs) { return (Floats)((Bits)pairs & 0xffff0000); }

inline Floats load(const float* p) { return read<Floats>(p); }
inline Floats load(const bf16* p) { return (Floats)(__builtin_convertvector(read<Halves>(p), Bits) << 16); }
inline void store(float* p, Floats x) { write(p, x); }
// Round to nearest, ties to even; NaN stays NaN. (The instructions for this flush subnormal numbers, and not every machine has them.)
inline void store(bf16* p, Floats x) {
  const Bits u = (Bits)x, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  write(p, __builtin_convertvector(x == x ? rounded : (u >> 16 | 0x40), Halves));
}
// The first n < LANES numbers, and zeros.
template <class T> Floats load(const T* p, int n) {
  T part[LANES] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <class T> void store(T* p, Floats x, int n) {
  T part[LANES];
  store(part, x);
  std::memcpy(p, part, n * sizeof(T));
}
// All LANES numbers, or the `left` ones that there are, and zeros.
template <class T> Floats load_some(const T* p, int64_t left) { return left >= LANES ? load(p) : load(p, (int)left); }
template <class T> void store_some(T* p, Floats x, int64_t left) { left >= LANES ? store(p, x) : store(p, x, (int)left); }
// f(integral_constant) for the number of rows of a tile, at most MOST.
template <int MOST, int ROWS = 1, class F> inline __attribute__((always_inline)) void with_rows(int64_t rows, const F& f) {
  if (rows == ROWS) return f(std::integral_constant<int, ROWS>{});
  if constexpr (ROWS < MOST) with_rows<MOST, ROWS + 1>(rows, f);
}

template <class From, class To> void convert(const From* from, To* to, int64_t count) {
  for (int64_t k = 0; k < count; k += LANES) store_some(to + k, load_some(from + k, count - k), count - k);
}

// x[i] lane j ↔ x[j] lane i
inline void transpose(Floats (&x)[LANES]) {
  for (int i = 0; i < LANES; i += 4) {
    const Floats a = low(x[i], x[i + 2]), b = low(x[i + 1], x[i + 3]), c = high(x[i], x[i + 2]), d = high(x[i + 1], x[i + 3]);
    x[i] = low(a, b), x[i + 1] = high(a, b), x[i + 2] = low(c, d), x[i + 3] = high(c, d);
  }
  quarters(x);
}

// x 2^n for whole n from -150 to 127; in two steps, so that the smallest results are subnormal numbers and then 0.
inline Floats scale_by_power_of_two(Floats x, Floats n) {
  const Ints whole = __builtin_convertvector(n, Ints), half = whole >> 1;
  const auto power = [](Ints e) { return (Floats)((Bits)(e + 127) << 23); };
  return x * power(half) * power(whole - half);
}

// e^x for x <= 0 and moderate x > 0, within 2 units in the last place (Cephes' expf, https://www.netlib.org/cephes); e^-inf = 0.
inline Floats exp(Floats x) {
  x = min(set(88.f), max(set(-104.f), x));  // in this order NaN stays NaN
  Floats n = round(x * set(1.44269504f));
  Floats r = fma(n, set(2.12194440e-4f), fma(n, set(-0.693359375f), x));
  Floats p = set(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = fma(p, r, set(c));
  p = fma(p, r * r, r + set(1.f));
  return scale_by_power_of_two(p, n);
}

inline Floats sigmoid(Floats x) { return set(1.f) / (set(1.f) + exp(-x)); }
inline Floats silu(Floats x) { return x / (set(1.f) + exp(-x)); }

// How weights of a type are multiplied: STEP inputs beside each other for each output, PARTS of them after one another; X is what the
// inputs are converted to.
struct Fp32 {
  using Stored = float;
  using X = float;
  using Sum = Floats;
  static constexpr int STEP = 1, PARTS = 1;
  static Floats load(const float* p, int) { return mtp::load(p); }
  static Floats broadcast(const float* x) { return set(*x); }
  static Floats step(Floats sum, Floats w, Floats x) { return fma(w, x, sum); }
};

struct Bf16 {
  using Stored = bf16;
  using Sum = Floats;
  static constexpr int STEP = 2;
#ifdef BF16_UNITS
  using X = bf16;
  static constexpr int PARTS = 1;
  static Ints load(const bf16* p, int) { return read<Ints>(p); }
  static Ints broadcast(const bf16* x) { return set(read<int32_t>(x)); }
  static Floats step(Floats sum, Ints w, Ints x) { return dot_bf16(sum, w, x); }
#else
  using X = float;
  static constexpr int PARTS = 2;
  static Floats load(const bf16* p, int part) { return part ? odd(read<Floats>(p)) : even(read<Floats>(p)); }
  static Floats broadcast(const float* x) { return set(*x); }
  static Floats step(Floats sum, Floats w, Floats x) { return fma(w, x, sum); }
#endif
};

struct Int8 {
  using Stored = int8_t;
  using Sum = Ints;
  static constexpr int STEP = 4;
#ifdef INT8_UNITS
  // They take one operand without a sign: weights are read as w + 128, and 128 times the sum of the inputs is taken off at the end.
  using X = int8_t;
  static constexpr int PARTS = 1, OFFSET = -128;
  static Ints load(const int8_t* p, int) { return read<Ints>(p) ^ int32_t(0x80808080); }
  static Ints step(Ints sum, Ints w, Ints x) { return dot_int8(sum, w, x); }
  static void store(int8_t* to, Floats whole) { write(to, __builtin_convertvector(__builtin_convertvector(whole, Ints), Bytes)); }
#else
  // Widened to 16 bits in registers, since a product of 8 bits by 8 can saturate: four inputs are b0 … b3 of 32 bits, of which the first
  // part multiplies b0 and b2, and the second b1 and b3.
  using X = int16_t;  // in the order 0, 2, 1, 3
  static constexpr int PARTS = 2, OFFSET = 0;
  static Ints load(const int8_t* p, int part) { return (Ints)((part ? read<Int16s>(p) : read<Int16s>(p) << 8) >> 8); }
  static Ints step(Ints sum, Ints w, Ints x) { return sum + dot_int16(w, x); }
  static void store(int16_t* to, Floats whole) {
    write(to, __builtin_convertvector(__builtin_convertvector(whole, Ints), Halves));
    for (int i = 0; i < LANES; i += 4) std::swap(to[i + 1], to[i + 2]);
  }
#endif
  static Ints broadcast(const X* x) { return set(read<int32_t>(x)); }
};

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the L2 cache
}  // namespace mtp
