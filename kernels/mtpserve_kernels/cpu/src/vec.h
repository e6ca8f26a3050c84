// Vector primitives of the instruction set that this object is compiled for: one header for each, all with the same names.
//
//   Floats           LANES float32 numbers
//   Bf16, Fp32       how weights of that type are multiplied: Weights (loaded), X (the type of the inputs), step()
//
// A panel is 16 outputs side by side (linear.h); PANEL_VECTORS Floats hold its sums.
#pragma once
#include "types.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#elif defined(__ARM_NEON)
#include "vec_neon.h"
#else
#error "no vector primitives for this instruction set"
#endif

namespace mtp {

constexpr int PANEL = 16;
constexpr int PANEL_VECTORS = PANEL / LANES;

// All LANES numbers, or the `left` ones that there are, and zeros.
template <class T> Floats load_some(const T* p, int64_t left) { return left >= LANES ? load(p) : load(p, (int)left); }
template <class T> void store_some(T* p, Floats x, int64_t left) { left >= LANES ? store(p, x) : store(p, x, (int)left); }

// e^x for x <= 0 and moderate x > 0, within 2 units in the last place (Cephes' expf, https://www.netlib.org/cephes); e^-inf = 0.
inline Floats exp(Floats x) {
  x = min(set(88.f), max(set(-104.f), x));  // in this order NaN stays NaN
  Floats n = round(mul(x, set(1.44269504f)));
  Floats r = fnma(n, set(-2.12194440e-4f), fnma(n, set(0.693359375f), x));
  Floats p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set(1.f)));
  return scale_by_power_of_two(p, n);
}

inline Floats silu(Floats x) { return div(x, add(set(1.f), exp(sub(zero(), x)))); }
inline Floats sigmoid(Floats x) { return div(set(1.f), add(set(1.f), exp(sub(zero(), x)))); }

}  // namespace mtp
