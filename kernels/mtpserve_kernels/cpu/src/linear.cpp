// Reference: torch.nn.functional.linear; layers/torch_kernels.py.
#include "linear.h"

#include <algorithm>
#include <vector>

#ifdef __AMX_BF16__
#include "linear_amx.h"
#endif

namespace mtp {
namespace {

constexpr int MAX_ROWS = 6;        // of a tile
constexpr int MAX_PANELS = 8;      // of a tile
constexpr int64_t ROW_BLOCK = 96;  // rows whose inputs stay in the cache while the weights are read once
constexpr int PREFETCH = 1024;     // bytes of a panel ahead

// Panels of a tile of `rows` rows: as many sums as there are registers for.
constexpr int panels_of(int rows) { return std::clamp(SUM_REGISTERS / (rows * PANEL_VECTORS), 1, MAX_PANELS); }

// Rows of a tile that has at least two panels, a gate's and its up's.
constexpr int GATED_ROWS = std::min(MAX_ROWS, SUM_REGISTERS / (2 * PANEL_VECTORS));

using Sums = Floats[PANEL_VECTORS];

// sums[m][p]: row m of x times panel p.
template <class Method, int ROWS, int PANELS>
inline __attribute__((always_inline)) void multiply(const typename Method::X* x, int64_t stride, const typename Method::Stored* const* panels,
                                                    int64_t inputs, Sums (&sums)[ROWS][PANELS]) {
  for (int m = 0; m < ROWS; m++)
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < PANEL_VECTORS; v++) sums[m][p][v] = zero();
  constexpr int LINE = PANEL * Method::STEP;  // numbers of a panel in one step
  for (int64_t k = 0; k < inputs / Method::STEP; k++) {
    for (int p = 0; p < PANELS; p++) {
      const typename Method::Stored* line = panels[p] + k * LINE;
      prefetch((const char*)line + PREFETCH);
      for (int v = 0; v < PANEL_VECTORS; v++) {
        const typename Method::Weights w = Method::load(line + v * LANES * Method::STEP);
        for (int m = 0; m < ROWS; m++) sums[m][p][v] = Method::step(sums[m][p][v], w, x + m * stride + k * Method::STEP);
      }
    }
  }
}

inline void put(const Output& out, int64_t row, int64_t column, Floats x, int64_t width) {
  int64_t left = std::min<int64_t>(width - column, LANES);
  if (left <= 0) return;
  if (out.type == FP32) {
    float* to = (float*)out.data + row * out.stride + column;
    left == LANES ? store(to, x) : store(to, x, (int)left);
  } else {
    bf16* to = (bf16*)out.data + row * out.stride + column;
    left == LANES ? store(to, x) : store(to, x, (int)left);
  }
}

// One tile: rows row … row + ROWS - 1, and PANELS panels from `panel` on; a gated tile has PANELS / 2 of the gate's and as many of the up's.
template <class Method, int ROWS, int PANELS, bool GATED>
void tile(const Matrix& matrix, const typename Method::X* x, int64_t stride, int64_t row, int64_t panel, const Output& out) {
  constexpr int WIDE = GATED ? PANELS / 2 : PANELS;
  const int64_t width = GATED ? matrix.outputs / 2 : matrix.outputs, halves = matrix.outputs / 2 / PANEL;
  const typename Method::Stored* panels[PANELS];
  int64_t first[PANELS];
  for (int p = 0; p < PANELS; p++) {
    int64_t index = p < WIDE ? panel + p : halves + panel + p - WIDE;
    panels[p] = (const typename Method::Stored*)matrix.data + index * PANEL * matrix.inputs;
    first[p] = index * PANEL;
  }
  Sums sums[ROWS][PANELS];
  multiply<Method>(x, stride, panels, matrix.inputs, sums);
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < PANEL_VECTORS; v++) {
      if (matrix.bias)
        for (int p = 0; p < PANELS; p++) sums[m][p][v] = add(sums[m][p][v], load(matrix.bias + first[p] + v * LANES));
      for (int p = 0; p < WIDE; p++) {
        Floats y = sums[m][p][v];
        if constexpr (GATED) y = mul(silu(y), sums[m][p + WIDE][v]);
        put(out, row + m, (panel + p) * PANEL + v * LANES, y, width);
      }
    }
}

// Tiles of ROWS rows for the panels [first, end).
template <class Method, int ROWS, bool GATED>
void tiles(const Matrix& matrix, const typename Method::X* x, int64_t stride, int64_t row, Range panels, const Output& out) {
  constexpr int PANELS = GATED ? std::max(panels_of(ROWS) / 2 * 2, 2) : panels_of(ROWS), WIDE = GATED ? PANELS / 2 : PANELS;
  int64_t p = panels.first;
  for (; p + WIDE <= panels.end; p += WIDE) tile<Method, ROWS, PANELS, GATED>(matrix, x, stride, row, p, out);
  for (; p < panels.end; p++) tile<Method, ROWS, GATED ? 2 : 1, GATED>(matrix, x, stride, row, p, out);
}

template <class Method, bool GATED>
void rows_of(const Matrix& matrix, const typename Method::X* x, int64_t stride, int64_t row, int64_t rows, Range panels, const Output& out) {
  switch (rows) {
    case 1: return tiles<Method, 1, GATED>(matrix, x, stride, row, panels, out);
    case 2: return tiles<Method, 2, GATED>(matrix, x, stride, row, panels, out);
    case 3: return tiles<Method, 3, GATED>(matrix, x, stride, row, panels, out);
  }
  if constexpr (!GATED || GATED_ROWS >= MAX_ROWS) {
    switch (rows) {
      case 4: return tiles<Method, 4, GATED>(matrix, x, stride, row, panels, out);
      case 5: return tiles<Method, 5, GATED>(matrix, x, stride, row, panels, out);
      case 6: return tiles<Method, 6, GATED>(matrix, x, stride, row, panels, out);
    }
  }
}

// Rows in tiles of nearly equal height: 7 are 4 + 3, not 6 + 1. A group of panels that stays in the cache is used by all tiles.
template <class Method, bool GATED>
void block(const Matrix& matrix, const typename Method::X* x, int64_t stride, int64_t row, int64_t rows, Range panels, const Output& out) {
  constexpr int64_t MOST = GATED ? GATED_ROWS : MAX_ROWS;
  const int64_t count = ceil_div(rows, MOST);
  const int64_t together = count == 1 ? panels.end - panels.first : GATED ? 2 : 4;
  for (int64_t p = panels.first; p < panels.end; p += together) {
    const Range group{p, std::min(panels.end, p + together)};
    for (int64_t i = 0; i < count; i++) {
      const int64_t from = rows * i / count, to = rows * (i + 1) / count;
      rows_of<Method, GATED>(matrix, x + from * stride, stride, row + from, to - from, group, out);
    }
  }
}

// x as the method multiplies it: itself where the type is right, otherwise a copy of these rows.
template <class X> const X* converted(const void* x, Type type, int64_t& stride, int64_t rows, int64_t inputs, std::vector<X>& room) {
  if (type == (sizeof(X) == 4 ? FP32 : BF16)) return (const X*)x;
  room.resize(rows * inputs);
  for (int64_t m = 0; m < rows; m++)
    for (int64_t k = 0; k < inputs; k++) {
      float value = type == FP32 ? ((const float*)x)[m * stride + k] : widen(((const bf16*)x)[m * stride + k]);
      assign(room[m * inputs + k], value);
    }
  stride = inputs;
  return room.data();
}

template <class Method>
void run(const Member& member, const Matrix& matrix, const void* x, Type type, int64_t stride, int64_t rows, const Output& out) {
  const int64_t panels = ceil_div(out.gated ? matrix.outputs / 2 : matrix.outputs, PANEL);
  const Range mine = member.part(panels);
  if (mine.first == mine.end) return;
  thread_local std::vector<typename Method::X> room;
  for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
    const int64_t count = std::min(ROW_BLOCK, rows - row);
    int64_t step = stride;
    const char* from = (const char*)x + row * stride * (type == FP32 ? 4 : 2);
    const typename Method::X* inputs = converted<typename Method::X>(from, type, step, count, matrix.inputs, room);
    if (out.gated) block<Method, true>(matrix, inputs, step, row, count, mine, out);
    else block<Method, false>(matrix, inputs, step, row, count, mine, out);
  }
}

}  // namespace

void linear(const Member& member, const Matrix& matrix, const void* x, Type x_type, int64_t stride, int64_t rows, const Output& out) {
#ifdef __AMX_BF16__
  if (matrix.type == BF16) {
    const int64_t width = out.gated ? matrix.outputs / 2 : matrix.outputs;
    const auto write = [&](int64_t row, int64_t panel, const float* sums, const float* up) {
      for (int64_t v = 0; v < PANEL; v += LANES) {
        const int64_t column = panel * PANEL + v;
        Floats y = load(sums + v), z = load(up + v);
        if (matrix.bias) y = add(y, load(matrix.bias + column));
        if (matrix.bias && out.gated) z = add(z, load(matrix.bias + width + column));
        put(out, row, column, out.gated ? mul(silu(y), z) : y, width);
      }
    };
    return amx::linear(member, matrix, x, x_type, stride, rows, out.gated, write);
  }
#endif
  if (matrix.type == FP32) run<Fp32>(member, matrix, x, x_type, stride, rows, out);
  else run<Bf16>(member, matrix, x, x_type, stride, rows, out);
}

}  // namespace mtp

extern "C" {

void mtp_linear(const mtp::Matrix* matrix, const void* x, int32_t x_type, int64_t stride, int64_t rows, void* out, int64_t out_stride,
                int32_t out_type, int32_t gated, int32_t threads) {
  const mtp::Output to{out, out_stride, mtp::Type(out_type), gated != 0};
  mtp::parallel(threads, [&](const mtp::Member& member) { mtp::linear(member, *matrix, x, mtp::Type(x_type), stride, rows, to); });
}

// W [outputs, inputs] row-major → panels, in place: outputs must be whole panels, and inputs whole steps. `size`: bytes of a number.
void mtp_pack(void* data, int64_t outputs, int64_t inputs, int32_t size, int32_t threads) {
  const int64_t step = 4 / size, bytes = inputs * size;
  mtp::parallel(threads, [&](const mtp::Member& member) {
    const mtp::Range mine = member.part(outputs / mtp::PANEL);
    std::vector<char> rows(mtp::PANEL * bytes);
    for (int64_t p = mine.first; p < mine.end; p++) {
      char* panel = (char*)data + p * mtp::PANEL * bytes;
      std::memcpy(rows.data(), panel, rows.size());
      for (int64_t k = 0; k < inputs / step; k++)
        for (int64_t j = 0; j < mtp::PANEL; j++) std::memcpy(panel + (k * mtp::PANEL + j) * 4, rows.data() + j * bytes + k * 4, 4);
    }
  });
}
}
