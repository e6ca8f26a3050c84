// The tiles of AMX, in memory. As on the chip: nothing works without a configuration, and a tile ends where its configuration says.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace emulated {

struct Tiles {
  bool configured = false;
  uint16_t bytes[8];
  uint8_t rows[8];
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline void load_config(const void* config) {
  const uint8_t* bytes = (const uint8_t*)config;
  check(bytes[0] == 1, "palette");
  for (int i = 1; i < 16; i++) check(bytes[i] == 0, "reserved");
  std::memcpy(tiles.bytes, bytes + 16, 16);
  std::memcpy(tiles.rows, bytes + 48, 8);
  for (int i = 0; i < 8; i++) check(tiles.bytes[i] <= 64 && tiles.rows[i] <= 16 && !tiles.bytes[i] == !tiles.rows[i], "shape");
  std::memset(tiles.data, 0, sizeof(tiles.data));
  tiles.configured = true;
}
inline void release() { tiles.configured = false; }

inline void used(int t) { check(tiles.configured && tiles.rows[t], "a tile without a configuration"); }
inline void zero_tile(int t) {
  used(t);
  std::memset(tiles.data[t], 0, sizeof(tiles.data[t]));
}
inline void load_tile(int t, const void* base, long stride) {
  zero_tile(t);
  for (int m = 0; m < tiles.rows[t]; m++) std::memcpy(tiles.data[t][m], (const char*)base + m * stride, tiles.bytes[t]);
}
inline void store_tile(int t, void* base, long stride) {
  used(t);
  for (int m = 0; m < tiles.rows[t]; m++) std::memcpy((char*)base + m * stride, tiles.data[t][m], tiles.bytes[t]);
}

// The sums of the even and of the odd products are added at the end.
inline void dot_bf16_tiles(int c, int a, int b) {
  used(a), used(b), used(c);
  check(tiles.rows[a] == tiles.rows[c] && tiles.bytes[b] == tiles.bytes[c] && tiles.bytes[a] == 4 * tiles.rows[b], "shapes of a product");
  auto number = [](const uint8_t* p) {
    uint32_t u = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  };
  for (int m = 0; m < tiles.rows[c]; m++)
    for (int n = 0; n < tiles.bytes[c] / 4; n++) {
      float part[2] = {0, 0}, sum;
      for (int k = 0; k < tiles.rows[b]; k++)
        for (int i = 0; i < 2; i++)
          part[i] = __builtin_fmaf(number(&tiles.data[a][m][4 * k + 2 * i]), number(&tiles.data[b][k][4 * n + 2 * i]), part[i]);
      std::memcpy(&sum, &tiles.data[c][m][4 * n], 4);
      sum += part[0] + part[1];
      std::memcpy(&tiles.data[c][m][4 * n], &sum, 4);
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_release() emulated::release()
#define _tile_loadd(t, base, stride) emulated::load_tile(t, base, stride)
#define _tile_stream_loadd(t, base, stride) emulated::load_tile(t, base, stride)
#define _tile_stored(t, base, stride) emulated::store_tile(t, base, stride)
#define _tile_zero(t) emulated::zero_tile(t)
#define _tile_dpbf16ps(c, a, b) emulated::dot_bf16_tiles(c, a, b)
