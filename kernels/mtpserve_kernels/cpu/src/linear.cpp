// Reference: torch.nn.functional.linear; layers/devices/torch_kernels.py.
#include "linear.h"

#include <bit>
#include <type_traits>

#ifdef __AMX_BF16__
#include "linear_amx.h"
#endif

namespace mtp {
namespace {
constexpr int MAX_ROWS = 6;    // of a tile
constexpr int MAX_PANELS = 4;  // of a tile
// Bytes of the panels that all tiles of a block of rows use while they are in the L2 cache, and at most, for tiles of full width.
constexpr int64_t GROUP = 96 << 10, MOST_GROUP = 512 << 10;
constexpr int64_t ROW_BLOCK = 256 << 10;  // bytes of the rows whose inputs stay in the L2 cache while the weights are read once
constexpr int64_t AHEAD = 6 << 10;        // bytes of weights that are on their way where one tile has all rows

// Panels of a tile of `rows` rows: as many sums as there are registers for.
constexpr int panels_of(int rows) { return std::clamp(SUM_REGISTERS / (rows * PANEL_VECTORS), 1, MAX_PANELS); }

// Rows of a tile that has at least two panels, a gate's and its up's.
constexpr int GATED_ROWS = std::min(MAX_ROWS, SUM_REGISTERS / (2 * PANEL_VECTORS));

#define UNROLL _Pragma("GCC unroll 8")

// The same pointer, but the compiler does not know that: what was loaded from it is loaded again, rather than kept in a register that a
// sum needs.
template <class T> inline const T* again(const T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// What a tile prefetches: of each panel, what lies `skip` bytes further, and that `advance` bytes per line. Where several tiles share a
// group of panels each fetches its part of the next group, so that memory and arithmetic are both busy all the time.
struct Ahead {
  int64_t skip, advance;
};

// A block of rows as a method multiplies them. int8: what the sums are multiplied with, and what is added to them before.
template <class X> struct Inputs {
  const X* x;
  int64_t stride;
  const float* scale;
  const int32_t* offset;

  Inputs rows_from(int64_t m) const { return {x + m * stride, stride, scale ? scale + m : nullptr, offset ? offset + m : nullptr}; }
};

template <class Method> using Sums = typename Method::Sum[PANEL_VECTORS];
template <class Method> constexpr bool SCALED = std::is_same_v<Method, Int8>;

// sums[m][p]: row m of x times panel p.
template <class Method, int ROWS, int PANELS>
inline __attribute__((always_inline)) void multiply(const typename Method::X* x, int64_t stride,
                                                    const typename Method::Stored* const* panels, int64_t inputs, Ahead ahead,
                                                    Sums<Method> (&sums)[ROWS][PANELS]) {
  using Stored = typename Method::Stored;
  constexpr int LINE = PANEL * Method::STEP, LINES = std::max(2 / Method::STEP, 1);  // numbers of a panel in one step; steps at once
  Sums<Method> part[ROWS][PANELS];                                                   // local: otherwise it is not kept in registers
  const Stored* lines[PANELS];
  const char* next[PANELS];
  UNROLL for (int p = 0; p < PANELS; p++) {
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) part[m][p][v] = typename Method::Sum{};
    lines[p] = panels[p];
    next[p] = (const char*)panels[p] + ahead.skip;
  }
  const typename Method::X* upper = x + 3 * stride;  // two pointers and one stride reach six rows without further additions
  for (int64_t k = 0; k < inputs; k += LINES * Method::STEP) {
    UNROLL for (int i = 0; i < LINES * Method::PARTS; i++) {
      UNROLL for (int p = 0; p < PANELS; p++) {
        const Stored* line = again(lines[p]) + i / Method::PARTS * LINE;
        if (i % Method::PARTS == 0) prefetch(next[p]), next[p] += ahead.advance;
        decltype(Method::load(line, 0)) w[PANEL_VECTORS];
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) w[v] = Method::load(line + v * LANES * Method::STEP, i % Method::PARTS);
        const typename Method::X *low = again(x) + i * Method::STEP / Method::PARTS,
                                 *high = again(upper) + i * Method::STEP / Method::PARTS;
        UNROLL for (int m = 0; m < ROWS; m++) {
          const auto at = Method::broadcast(m < 3 ? low + m * stride : high + (m - 3) * stride);
          UNROLL for (int v = 0; v < PANEL_VECTORS; v++) part[m][p][v] = in_register(Method::step(part[m][p][v], w[v], at));
        }
      }
    }
    UNROLL for (int p = 0; p < PANELS; p++) lines[p] += LINE * LINES;
    x += LINES * Method::STEP;
    upper += LINES * Method::STEP;
  }
  UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int p = 0; p < PANELS; p++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
      sums[m][p][v] = part[m][p][v];
}

// NaN stays NaN: comparisons let it through.
inline Floats clamped(Floats gate, Floats up, const Clamp& clamp) {
  const Floats most = set(clamp.most), limit = set(clamp.limit), least = set(-clamp.limit);
  gate = gate > most ? most : gate;
  up = up > limit ? limit : up < least ? least : up;
  return gate * sigmoid(set(clamp.alpha) * gate) * (up + set(clamp.plus));
}

// Products at `column` of a row of the result; gated, `up` are those that the gates in y are for.
inline void put(const Matrix& matrix, const Output& out, int64_t row, int64_t column, Floats y, Floats up) {
  const int64_t width = out.gated ? matrix.outputs / 2 : matrix.outputs;
  if (column >= width) return;
  if (matrix.bias) y = y + load(matrix.bias + column);
  if (matrix.bias && out.gated) up = up + load(matrix.bias + width + column);
  if (out.gated) y = out.clamp.limit > 0 ? clamped(y, up, out.clamp) : silu(y) * up;
  if (out.squared) y = y < set(0.f) ? set(0.f) : y * y;
  by_type(out.type, [&](auto n) { store_some((decltype(n)*)out.data + row * out.stride + column, y, width - column); });
}

// One tile: rows row … row + ROWS - 1, and PANELS panels from `panel` on; a gated tile has PANELS / 2 of the gate's and as many of the
// up's.
template <class Method, int ROWS, int PANELS, bool GATED>
void tile(const Matrix& matrix, const Inputs<typename Method::X>& x, int64_t row, int64_t panel, Ahead ahead, const Output& out) {
  constexpr int WIDE = GATED ? PANELS / 2 : PANELS;
  const int64_t halves = matrix.outputs / 2 / PANEL;
  const typename Method::Stored* panels[PANELS];
  int64_t first[PANELS];
  for (int p = 0; p < PANELS; p++) {
    const int64_t index = p < WIDE ? panel + p : halves + panel + p - WIDE;
    panels[p] = (const typename Method::Stored*)((const char*)matrix.data + index * PANEL * matrix.row_bytes());
    first[p] = index * PANEL;
  }
  Sums<Method> sums[ROWS][PANELS];
  multiply<Method>(x.x, x.stride, panels, matrix.inputs, ahead, sums);
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < PANEL_VECTORS; v++) {
      Floats y[PANELS];
      for (int p = 0; p < PANELS; p++) {
        if constexpr (SCALED<Method>)
          y[p] = __builtin_convertvector(sums[m][p][v] + x.offset[m], Floats) * x.scale[m] * load(matrix.scale + first[p] + v * LANES);
        else y[p] = sums[m][p][v];
      }
      for (int p = 0; p < WIDE; p++) put(matrix, out, row + m, (panel + p) * PANEL + v * LANES, y[p], y[GATED ? p + WIDE : p]);
    }
}

// Tiles of ROWS rows for the panels [first, end): as wide as possible, then the half of that, …
template <class Method, int ROWS, bool GATED, int WIDE>
void tiles(const Matrix& matrix, const Inputs<typename Method::X>& x, int64_t row, Range panels, Ahead ahead, const Output& out) {
  int64_t p = panels.first;
  const Ahead each{ahead.skip ? ahead.skip : AHEAD / WIDE, ahead.advance};
  for (; p + WIDE <= panels.end; p += WIDE) tile<Method, ROWS, GATED ? 2 * WIDE : WIDE, GATED>(matrix, x, row, p, each, out);
  if constexpr (WIDE > 1)
    if (p < panels.end) tiles<Method, ROWS, GATED, WIDE / 2>(matrix, x, row, {p, panels.end}, ahead, out);
}

template <class Method, bool GATED> void rows_of(const Matrix& matrix, const Inputs<typename Method::X>& x, int64_t row, int64_t rows,
                                                 Range panels, Ahead ahead, const Output& out) {
  with_rows<GATED ? GATED_ROWS : MAX_ROWS>(rows, [&](auto many) {
    tiles<Method, many, GATED, GATED ? std::max(panels_of(many) / 2, 1) : panels_of(many)>(matrix, x, row, panels, ahead, out);
  });
}

// Panels of `bytes` that make a group; gated, pairs of them. Whole tiles, since narrower ones have fewer sums than the units can be busy
// with.
template <bool GATED> int64_t panels_together(int64_t bytes) {
  constexpr int WIDE = GATED ? std::max(panels_of(GATED_ROWS) / 2, 1) : panels_of(MAX_ROWS);
  const int64_t each = bytes * (GATED ? 2 : 1), wanted = ceil_div(std::max<int64_t>(GROUP / each, 1), WIDE) * WIDE;
  return wanted * each <= MOST_GROUP ? wanted : std::max<int64_t>(std::bit_floor(uint64_t(MOST_GROUP / each)), 1);
}

// Rows in tiles of nearly equal height: 7 are 4 + 3, not 6 + 1. A group of panels that stays in the cache is used by all tiles.
template <class Method, bool GATED>
void block(const Matrix& matrix, const Inputs<typename Method::X>& x, int64_t row, int64_t rows, Range panels, const Output& out) {
  const int64_t count = ceil_div(rows, GATED ? GATED_ROWS : MAX_ROWS);
  if (count == 1) return rows_of<Method, GATED>(matrix, x, row, rows, panels, {0, PANEL * 4}, out);
  const int64_t bytes = PANEL * matrix.row_bytes(), together = panels_together<GATED>(bytes);
  for (int64_t p = panels.first; p < panels.end; p += together) {
    const Range group{p, std::min(panels.end, p + together)};
    for (int64_t i = 0; i < count; i++) {
      const int64_t from = rows * i / count, to = rows * (i + 1) / count;
      const Ahead ahead{together * bytes + bytes * i / count, PANEL * 4 / count};
      rows_of<Method, GATED>(matrix, x.rows_from(from), row + from, to - from, group, ahead, out);
    }
  }
}

// from ≈ to * scale, with the largest at 127. A row that has a NaN or an infinity gets NaN as its scale. Reference: quant/reference.py.
template <class Method, class From> void quantize(const From* from, typename Method::X* to, int64_t count, float& scale, int32_t& offset) {
  Floats largest = {}, poison = {};
  auto each = [&](auto body) {
    for (int64_t k = 0; k < count; k += LANES) body(k, load_some(from + k, count - k));
  };
  each([&](int64_t, Floats x) {
    largest = max(largest, max(x, -x));
    poison = fma(x, Floats{}, poison);
  });
  const float most = max(largest), inverse = most > 0 ? 127 / most : 0;
  Floats total = {};  // of whole numbers, and exact
  each([&](int64_t k, Floats x) {
    const Floats whole = round(x * set(inverse));
    total = total + whole;
    Method::store(to + k, whole);
  });
  scale = most / 127 + sum(poison);
  offset = scale == scale ? Method::OFFSET * int32_t(sum(total)) : 0;
}

// These rows as the method multiplies them: the tensor itself where the type is right, otherwise a copy.
template <class Method, class From> Inputs<typename Method::X> converted(const From* x, int64_t stride, int64_t rows, int64_t inputs) {
  using X = typename Method::X;
  if constexpr (std::is_same_v<From, X>) return {x, stride, nullptr, nullptr};
  else {
    thread_local std::vector<X> numbers;
    thread_local std::vector<float> scale;
    thread_local std::vector<int32_t> offset;
    const int64_t step = ceil_div(inputs, LANES) * LANES + LANES;  // not a power of two: the rows shall not share the sets of a cache
    X* to = room(numbers, rows * step);
    if constexpr (SCALED<Method>) {
      scale.resize(rows), offset.resize(rows);
      for (int64_t m = 0; m < rows; m++) quantize<Method>(x + m * stride, to + m * step, inputs, scale[m], offset[m]);
    } else {
      for (int64_t m = 0; m < rows; m++) convert(x + m * stride, to + m * step, inputs);
    }
    return {to, step, scale.data(), offset.data()};
  }
}

// What a member computes: some of the panels, and where there are many rows for few panels some of the rows.
struct Share {
  Range rows, panels;
};

Share share(const Member& member, int64_t rows, int64_t panels) {
  int across = 1;  // parts of the rows
  int64_t least = INT64_MAX / 16;
  for (int parts = 1; parts <= member.size; parts++) {
    if (member.size % parts) continue;
    // Tiles of the busiest member. Splitting the rows reads the weights more often, so it has to pay.
    const int64_t tiles = ceil_div(panels, member.size / parts) * ceil_div(ceil_div(rows, MAX_ROWS), parts);
    if (tiles * 10 < least * 9) least = tiles, across = parts;
  }
  const int down = member.size / across;
  return {Member{member.index / down, across, nullptr}.part(rows), Member{member.index % down, down, nullptr}.part(panels)};
}

template <class Method, class From>
void run(const Member& member, const Matrix& matrix, const From* x, int64_t stride, int64_t rows, const Output& out) {
  const Share mine = share(member, rows, ceil_div(out.gated ? matrix.outputs / 2 : matrix.outputs, PANEL));
  if (mine.panels.first == mine.panels.end) return;
  const int64_t room = ROW_BLOCK / (matrix.inputs * (int64_t)sizeof(typename Method::X)),
                most = std::clamp<int64_t>(room / MAX_ROWS, 2, 16) * MAX_ROWS;
  for (int64_t row = mine.rows.first; row < mine.rows.end; row += most) {
    const int64_t count = std::min(most, mine.rows.end - row);
    const auto inputs = converted<Method>(x + row * stride, stride, count, matrix.inputs);
    if (out.gated) block<Method, true>(matrix, inputs, row, count, mine.panels, out);
    else block<Method, false>(matrix, inputs, row, count, mine.panels, out);
  }
}
}  // namespace

void linear(const Member& member, const Matrix& matrix, const void* x, Type x_type, int64_t stride, int64_t rows, const Output& out) {
#ifdef __AMX_BF16__
  if (matrix.type == BF16) {
    const auto write = [&](int64_t row, int64_t panel, const float* sums, const float* up) {
      for (int64_t v = 0; v < PANEL; v += LANES) put(matrix, out, row, panel * PANEL + v, load(sums + v), load(up + v));
    };
    return amx::linear(member, matrix, x, x_type, stride, rows, out.gated, write);
  }
#endif
  by_type(x_type, [&](auto number) {
    const auto* from = (const decltype(number)*)x;
    if (matrix.type == FP32) run<Fp32>(member, matrix, from, stride, rows, out);
    else if (matrix.type == BF16) run<Bf16>(member, matrix, from, stride, rows, out);
    else run<Int8>(member, matrix, from, stride, rows, out);
  });
}

// Reference: the two torch.bmm of mtpserve/layers/mixers/mla.py.
void heads_linear(const Member& member, const Matrices& matrices, const Heads& x, int64_t rows, const Heads& out) {
  // Whole heads for each member where they come out nearly even, otherwise a part of each head.
  const bool whole = matrices.number % member.size == 0 || matrices.number >= 4 * member.size;
  const Range mine = whole ? member.part(matrices.number) : Range{0, matrices.number};
  const Member team = whole ? member.alone() : member;
  for (int64_t head = mine.first; head < mine.end; head++) {
    const char* from = (const char*)x.data + head * x.head_stride * size_of(x.type);
    const Output to{(char*)out.data + head * out.head_stride * size_of(out.type), out.stride, out.type, false};
    linear(team, matrices[head], from, x.type, x.stride, rows, to);
  }
}

extern "C" {

void mtp_linear(const Matrix* matrix, const void* x, int32_t type, int64_t stride, int64_t rows, const Output* out, int32_t threads) {
  parallel(threads, [&](const Member& member) { linear(member, *matrix, x, Type(type), stride, rows, *out); });
}

void mtp_heads_linear(const Matrices* matrices, const Heads* x, int64_t rows, const Heads* out, int32_t threads) {
  const int64_t work = rows * matrices->number * matrices->first.outputs * matrices->first.inputs;
  parallel(worth(threads, work), [&](const Member& member) { heads_linear(member, *matrices, *x, rows, *out); });
}

// W [outputs, inputs] row-major → panels, in place: outputs must be whole panels, and inputs whole steps. `size`: bytes of a number.
void mtp_pack(void* data, int64_t outputs, int64_t inputs, int32_t size, int32_t threads) {
  const int64_t step = 4 / size, bytes = inputs * size;
  parallel(threads, [&](const Member& member) {
    const Range mine = member.part(outputs / PANEL);
    std::vector<char> rows(PANEL * bytes);
    for (int64_t p = mine.first; p < mine.end; p++) {
      char* panel = (char*)data + p * PANEL * bytes;
      std::memcpy(rows.data(), panel, rows.size());
      for (int64_t k = 0; k < inputs / step; k++)
        for (int64_t j = 0; j < PANEL; j++) std::memcpy(panel + (k * PANEL + j) * 4, rows.data() + j * bytes + k * 4, 4);
    }
  });
}
}
}  // namespace mtp
