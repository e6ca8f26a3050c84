// Linear layers in bfloat16 on AMX: 16 inputs' pairs times 16 outputs are one tile of the packed weights (linear.h), 16 cache lines as
// they lie in memory. Included by linear.cpp where the compiler is told that there is AMX.
//
// Every number of rows is computed this way, so that a row's sums are the same beside any others: an element of a tile's product depends
// on its own row of x alone. Where there are fewer than 16 rows the tiles have fewer.
#pragma once
#include <immintrin.h>

#include "linear.h"

namespace mtp::amx {
constexpr int TILE = 16;           // rows, and outputs
constexpr int DEPTH = 32;          // inputs of one product
constexpr int64_t ROW_BLOCK = 96;  // rows whose inputs stay in the cache while the weights are read once

// gcc 12's intrinsics do not say which memory they read and write: here all of it is as written.
inline void settled(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// A thread's tiles while this lives: 0 to 3 sums [rows, 16], 4 and 5 inputs [rows, 32], 6 and 7 weights [16, 16, 2].
struct Tiles {
  explicit Tiles(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int t = 0; t < 8; t++) shape.bytes[t] = 64, shape.rows[t] = uint8_t(t < 6 ? rows : TILE);
    settled(&shape);
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

using Sums = float[TILE][PANEL];

// sums[r][p]: tile of rows r of x times panel p. x [2 * height, stride], zeros from `inputs` to `stride`, which is whole products.
inline void multiply(const bf16* x, int64_t stride, int64_t height, const bf16* const (&panels)[2], int64_t inputs, Sums (&sums)[2][2]) {
  settled(x);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto product = [&](int64_t k, const bf16* first, const bf16* second) {
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(5, x + height * stride + k, stride * 2);
    _tile_stream_loadd(6, first, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_stream_loadd(7, second, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  };
  int64_t k = 0;
  for (; k + DEPTH <= inputs; k += DEPTH) product(k, panels[0] + k * PANEL, panels[1] + k * PANEL);
  if (k < inputs) {  // what lies behind the panel is another's, and zero times NaN is NaN
    alignas(64) bf16 last[2][DEPTH * PANEL] = {};
    for (int p = 0; p < 2; p++) std::memcpy(last[p], panels[p] + k * PANEL, (inputs - k) * PANEL * sizeof(bf16));
    settled(last);
    product(k, last[0], last[1]);
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  _tile_stored(2, sums[1][0], 64);
  _tile_stored(3, sums[1][1], 64);
  settled(sums);
}

// `write(row, panel, sums, beside)`: 16 outputs of a row; a gated matrix has its up's beside.
template <class Write>
void linear(const Member& member, const Matrix& matrix, const void* x, Type type, int64_t stride, int64_t rows, bool gated, Write&& write) {
  const int64_t halves = matrix.outputs / 2 / PANEL, depth = ceil_div(matrix.inputs, DEPTH) * DEPTH;
  const Range mine = member.part(gated ? halves : ceil_div(matrix.outputs, PANEL));
  if (mine.first == mine.end || rows == 0) return;
  thread_local std::vector<bf16> room;
  for (int64_t from = 0; from < rows; from += ROW_BLOCK) {
    // Pairs of tiles of equal height: 17 rows are 9 + 8 and one of zeros. Few rows wait for the weights and not for the products.
    const int64_t count = std::min(ROW_BLOCK, rows - from), tiles = 2 * ceil_div(count, 2 * TILE), height = ceil_div(count, tiles);
    room.assign(tiles * height * depth, bf16{0});
    by_type(type, [&](auto number) {
      const auto* row = (const decltype(number)*)x + from * stride;
      for (int64_t m = 0; m < count; m++) convert(row + m * stride, room.data() + m * depth, matrix.inputs);
    });
    const Tiles configured((int)height);
    for (int64_t p = mine.first; p < mine.end; p += gated ? 1 : 2) {
      const int64_t second = gated ? halves + p : std::min(p + 1, mine.end - 1);  // the last panel may be alone
      const bf16* const data[2] = {(const bf16*)matrix.data + p * PANEL * matrix.inputs,
                                   (const bf16*)matrix.data + second * PANEL * matrix.inputs};
      for (int64_t t = 0; t < tiles; t += 2) {
        alignas(64) Sums sums[2][2];
        multiply(room.data() + t * height * depth, depth, height, data, matrix.inputs, sums);
        for (int64_t r = 0; r < std::min(2 * height, count - t * height); r++) {
          const float *first = sums[r / height][0][r % height], *beside = sums[r / height][1][r % height];
          write(from + t * height + r, p, first, beside);
          if (!gated && second > p) write(from + t * height + r, second, beside, beside);
        }
      }
    }
  }
}
}  // namespace mtp::amx
