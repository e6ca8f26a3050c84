// The vector primitives of vec.h, one by one, for test_vec.py.
#include "vec.h"

namespace {
using namespace mtp;

// out[i] = f(a[i], b[i], c[i]); n is a multiple of the lanes.
template <class F> void each(const float* a, const float* b, const float* c, float* out, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += LANES) store(out + i, f(load(a + i), load(b + i), load(c + i)));
}
}  // namespace

extern "C" {
int32_t probe_lanes() { return LANES; }

void probe_math(int32_t op, const float* a, const float* b, const float* c, float* out, int64_t n) {
  switch (op) {
    case 0: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return x + y; });
    case 1: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return x - y; });
    case 2: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return x * y; });
    case 3: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return x / y; });
    case 4: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return max(x, y); });
    case 5: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return min(x, y); });
    case 6: return each(a, b, c, out, n, [](Floats x, Floats y, Floats z) { return fma(x, y, z); });
    case 7: return each(a, b, c, out, n, [](Floats x, Floats, Floats) { return even(x); });
    case 8: return each(a, b, c, out, n, [](Floats x, Floats, Floats) { return mtp::round(x); });
    case 9: return each(a, b, c, out, n, [](Floats x, Floats, Floats) { return mtp::exp(x); });
    case 10: return each(a, b, c, out, n, [](Floats x, Floats, Floats) { return silu(x); });
    case 11: return each(a, b, c, out, n, [](Floats x, Floats y, Floats) { return scale_by_power_of_two(x, y); });
    case 12: return each(a, b, c, out, n, [](Floats x, Floats, Floats) { return odd(x); });
  }
}

void probe_narrow(const float* a, bf16* vectors, bf16* scalars, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(vectors + i, load(a + i));
  for (int64_t i = 0; i < n; i++) scalars[i] = narrow(a[i]);
}

void probe_widen(const bf16* a, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(out + i, load(a + i));
}

// The first `count` of a vector: numbers behind them are neither read nor written.
void probe_part(const float* a, const bf16* b, float* whole, float* wide, float* part, bf16* narrow, int32_t count) {
  store(whole, load(a, count));
  store(wide, load(b, count));
  store(part, load(a, count), count);
  store(narrow, load(b, count), count);
}

void probe_reduce(const float* a, float* sums, float* most, int64_t n) {
  for (int64_t i = 0; i < n; i++) sums[i] = sum(load(a + i * LANES)), most[i] = max(load(a + i * LANES));
}

// Masks of each vector: a >= b; a or b is NaN; both.
void probe_compare(const float* a, const float* b, uint32_t* not_less, uint32_t* nan, uint32_t* either, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const Floats x = load(a + i * LANES), y = load(b + i * LANES);
    not_less[i] = bits(at_least(x, y)), nan[i] = bits(either_nan(x, y)), either[i] = bits(at_least(x, y) | either_nan(x, y));
  }
}

// [LANES, LANES]
void probe_transpose(const float* a, float* out) {
  Floats x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = load(a + i * LANES);
  transpose(x);
  for (int i = 0; i < LANES; i++) store(out + i * LANES, x[i]);
}
}
