// Attention's two products, tile by tile: of queries with a block of keys, and of weights with the values; and the weights of scores.
// attention.cpp has the rest.
//
// Scores: a block of keys is transposed into scratch once for all rows × heads that share it; then lanes are keys, and the rows' numbers
// are broadcast. Lanes over the key's numbers would need a horizontal sum for each score: equal for one row, slower for many. Keys are
// float32 there; where keys and queries are bfloat16, and there are units for it, they stay pairs of bfloat16, which are multiplied as
// such.
//
// Weighted sums: lanes are the value's numbers, and the rows' weights are broadcast. With pairs, two columns beside each other, of which
// the first is even, are added at once: their weights are rounded to bfloat16, as FlashAttention's are (Dao 2023,
// https://arxiv.org/abs/2307.08691).
#pragma once
#include <cmath>
#include <type_traits>

#include "threads.h"

namespace mtp {
namespace {
constexpr int BLOCK = 64;        // columns
constexpr int MOST = 2 * BLOCK;  // columns at once: a tree of 64 nodes may lie in two blocks
constexpr int MAX_ROWS = 6;      // of a tile

constexpr int BLOCK_VECTORS = BLOCK / LANES;

// Vectors of a tile of `rows` rows: as many sums as there are registers for.
constexpr int vectors_of(int rows) {
  int vectors = BLOCK_VECTORS;
  while (vectors > 1 && vectors * rows > SUM_REGISTERS) vectors /= 2;
  return vectors;
}

int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

// LANES keys of `dim` numbers, at keys + offsets[i] → to[d][PANEL], of which they are LANES columns. Two of bfloat16 are moved as one of 32
// bits; `dim` is even.
template <class K> void transpose_keys(const K* keys, const int64_t* offsets, int64_t dim, float* to) {
  constexpr int EACH = 4 / sizeof(K);
  for (int64_t d = 0; d < dim; d += EACH * LANES) {
    Floats x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = load_some((const float*)(keys + offsets[i] + d), (dim - d) / EACH);
    transpose(x);
    for (int i = 0; i < LANES; i++) {
      store(to + (d + EACH * i) * PANEL, EACH == 1 ? x[i] : even(x[i]));
      if (EACH == 2) store(to + (d + EACH * i + 1) * PANEL, odd(x[i]));
    }
  }
}

#ifdef BF16_UNITS
constexpr bool PAIRS = true;
inline Floats add_products(Floats sum, Floats key, const bf16* pair) { return dot_bf16(sum, (Ints)key, set(read<int32_t>(pair))); }
#else
constexpr bool PAIRS = false;
inline Floats add_products(Floats sum, Floats, const bf16*) { return sum; }  // not called
#endif
inline Floats add_products(Floats sum, Floats key, const float* x) { return fma(set(*x), key, sum); }

// The same for pairs: to[d / 2][PANEL] of 32 bits.
inline void transpose_pairs(const bf16* keys, const int64_t* offsets, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += 2 * LANES) {
    Floats x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = load_some((const float*)(keys + offsets[i] + d), (dim - d) / 2);
    transpose(x);
    for (int i = 0; i < LANES; i++) store(to + (d / 2 + i) * PANEL, x[i]);
  }
}

// q [ROWS, dim], keys [BLOCK / PANEL][padded][PANEL] → scores [ROWS][MOST], times `scale`; of the columns `seen`, rounded to whole tiles.
// With pairs of numbers in q and keys, dim and padded are those of pairs.
template <int ROWS, class Q>
void multiply_keys(const Q* q, int64_t dim, const float* keys, int64_t padded, float scale, Range seen, float* scores) {
  constexpr int EACH = 4 / sizeof(Q);
  constexpr int VECTORS = vectors_of(ROWS), COLUMNS = VECTORS * LANES;
  for (int64_t c = seen.first / COLUMNS * COLUMNS; c < seen.end; c += COLUMNS) {
    const float* lines[VECTORS];
    Floats sums[ROWS][VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      const int64_t column = c + v * LANES;
      lines[v] = keys + column / PANEL * PANEL * padded + column % PANEL;
      for (int m = 0; m < ROWS; m++) sums[m][v] = Floats{};
    }
    for (int64_t d = 0; d < dim; d++) {
      Floats key[VECTORS];
      for (int v = 0; v < VECTORS; v++) key[v] = load(lines[v] + d * PANEL);
      for (int m = 0; m < ROWS; m++) {
        for (int v = 0; v < VECTORS; v++) sums[m][v] = add_products(sums[m][v], key[v], q + (m * dim + d) * EACH);
      }
    }
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) store(scores + m * MOST + c + v * LANES, sums[m][v] * set(scale));
  }
}

// scores → p = e^(score - largest), with 0 where the row does not see. → their sum. `largest` so far grows if it must. PAIRED: as bfloat16
// beside each other.
template <bool PAIRED> inline float weigh(float* scores, Range seen, float& largest) {
  for (int64_t j = 0; j < seen.first; j++) scores[j] = -INFINITY;
  for (int64_t j = seen.end; j < BLOCK; j++) scores[j] = -INFINITY;
  Floats most = load(scores);
  for (int v = 1; v < BLOCK_VECTORS; v++) most = max(load(scores + v * LANES), most);
  largest = std::max(max(most), largest);
  const float base = largest == -INFINITY ? 0 : largest;  // -inf - -inf is NaN
  Floats total = {};
  for (int v = 0; v < BLOCK_VECTORS; v++) {
    Floats p = exp(load(scores + v * LANES) - set(base));
    if constexpr (PAIRED) {
      bf16* to = (bf16*)scores + v * LANES;
      store(to, p), p = load(to);
    } else {
      store(scores + v * LANES, p);
    }
    total = total + p;
  }
  return sum(total);
}

// sums[m] += p[m][j] v[j], j over `columns`, v[j] at values + offsets[j]; VECTORS vectors of it, or one of `count` numbers.
template <int ROWS, int VECTORS, bool COUNTED, class V>
inline __attribute__((always_inline)) void add_tile(const float* p, const V* values, const int64_t* offsets, int64_t e, int count,
                                                    Range columns, float* out, int64_t stride) {
  Floats sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = load(out + m * stride + e + v * LANES);
  for (int64_t j = columns.first; j < columns.end; j++) {
    const V* value = values + offsets[j] + e;
    Floats x[VECTORS];
    for (int v = 0; v < VECTORS; v++) x[v] = COUNTED ? load(value, count) : load(value + v * LANES);
    for (int m = 0; m < ROWS; m++) {
      const Floats weight = set(p[m * MOST + j]);
      for (int v = 0; v < VECTORS; v++) sums[m][v] = fma(weight, x[v], sums[m][v]);
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(out + m * stride + e + v * LANES, sums[m][v]);
}

// All `dim` numbers from e on, in the widest tiles that fit.
template <int ROWS, int VECTORS, class V> void add_values(const float* p, const V* values, const int64_t* offsets, int64_t e, int64_t dim,
                                                          Range columns, float* out, int64_t stride) {
  for (; e + VECTORS * LANES <= dim; e += VECTORS * LANES) add_tile<ROWS, VECTORS, false>(p, values, offsets, e, 0, columns, out, stride);
  if constexpr (VECTORS > 1) {
    if (e < dim) add_values<ROWS, VECTORS / 2>(p, values, offsets, e, dim, columns, out, stride);
  } else if (e < dim) {
    add_tile<ROWS, 1, true>(p, values, offsets, e, int(dim - e), columns, out, stride);
  }
}

// LANES numbers of one value beside those of another: pairs of 32 bits.
inline Floats paired(const bf16* first, const bf16* second) {
  return (Floats)(__builtin_convertvector(read<Halves>(first), Bits) | __builtin_convertvector(read<Halves>(second), Bits) << 16);
}

// Values of the columns 2 i and 2 i + 1, numbers from e on.
struct PairsInPlace {
  const bf16* values;
  const int64_t* offsets;
  Floats operator()(int64_t i, int64_t e) const { return paired(values + offsets[2 * i] + e, values + offsets[2 * i + 1] + e); }
};
struct PackedPairs {
  const float* values;
  int64_t stride;
  Floats operator()(int64_t i, int64_t e) const { return load(values + i * stride + e); }
};

// The columns `part`, at values + offsets[column] → to[column / 2][stride] of pairs; what is no column of it is 0.
inline void pack_pairs(const bf16* values, const int64_t* offsets, Range part, int64_t dim, float* to, int64_t stride) {
  alignas(64) static constexpr bf16 zeros[LANES] = {};
  for (int64_t j = part.first / 2 * 2; j < part.end; j += 2, to += stride) {
    const bf16* first = j >= part.first ? values + offsets[j] : nullptr;
    const bf16* second = j + 1 < part.end ? values + offsets[j + 1] : nullptr;
    int64_t e = 0;
    for (; e + LANES <= dim; e += LANES) store(to + e, paired(first ? first + e : zeros, second ? second + e : zeros));
    if (e == dim) continue;
    bf16 rest[2][LANES] = {};
    if (first) std::copy(first + e, first + dim, rest[0]);
    if (second) std::copy(second + e, second + dim, rest[1]);
    store(to + e, paired(rest[0], rest[1]));
  }
}

// sums[m] += p[m][i] · value(i), i over `pairs`, of VECTORS vectors from e on. p: pairs, from row to row MOST of them.
template <int ROWS, int VECTORS, class Value>
void add_pairs(const float* p, const Value& value, int64_t e, Range pairs, float* out, int64_t stride) {
  Floats sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = load(out + m * stride + e + v * LANES);
  for (int64_t i = pairs.first; i < pairs.end; i++) {
    Floats x[VECTORS];
    for (int v = 0; v < VECTORS; v++) x[v] = value(i, e + v * LANES);
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] = add_products(sums[m][v], x[v], (const bf16*)(p + m * MOST + i));
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(out + m * stride + e + v * LANES, sums[m][v]);
}

// f(e, number of vectors) for all `width` numbers, a multiple of LANES.
template <int VECTORS, class F> void each_width(int64_t e, int64_t width, const F& f) {
  for (; e + VECTORS * LANES <= width; e += VECTORS * LANES) f(e, std::integral_constant<int, VECTORS>{});
  if constexpr (VECTORS > 1) each_width<VECTORS / 2>(e, width, f);
}
}  // namespace
}  // namespace mtp
