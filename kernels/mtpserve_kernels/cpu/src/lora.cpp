// Reference: lora/reference.py.
#include "threads.h"

namespace mtp {
namespace {
// x [rows, inputs]; y [rows, outputs], without gaps, changed in place; a [slots, parts rank, inputs]; b [slots, rank, outputs].
struct AddLora {
  const void* x;
  int64_t stride;
  Type type;  // of x, a and b
  void* y;
  Type y_type;
  const int64_t *slots, *order;  // [rows]: a row's adapter, -1: none; the rows by adapter
  const void *a, *b;
  const int64_t* ends;  // [parts], the output after each part's last one
  float* low;           // [rows, parts rank], room for the products with a
  int64_t rows, inputs, outputs, rank, parts;
};

template <class T> float dot(const T* x, const T* w, int64_t size) {
  Floats sums[4] = {};
  int64_t k = 0;
  for (; k + 4 * LANES <= size; k += 4 * LANES)
    for (int i = 0; i < 4; i++) sums[i] = fma(load(x + k + i * LANES), load(w + k + i * LANES), sums[i]);
  for (; k < size; k += LANES) sums[0] = fma(load_some(x + k, size - k), load_some(w + k, size - k), sums[0]);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

float rounded(float x, float) { return x; }
float rounded(float x, bf16) { return widen(narrow(x)); }

// Rows of A that are this member's, each for all rows of x: it stays in the cache for those of one adapter.
template <class T> void shrink(const Member& member, const AddLora& op) {
  const int64_t all = op.parts * op.rank;
  for (int64_t j = member.part(all).first; j < member.part(all).end; j++)
    for (int64_t i = 0; i < op.rows; i++) {
      const int64_t row = op.order[i], slot = op.slots[row];
      if (slot < 0) continue;
      op.low[row * all + j] = rounded(dot((const T*)op.x + row * op.stride, (const T*)op.a + (slot * all + j) * op.inputs, op.inputs), T());
    }
}

// y [count] += low [rank] b [rank, count], where the rows of b are `stride` numbers apart.
template <class T, class Y> void expand(Y* y, const float* low, const T* b, int64_t rank, int64_t stride, int64_t count) {
  for (int64_t n = 0; n < count; n += LANES) {
    Floats total = {};
    for (int64_t r = 0; r < rank; r++) total = fma(set(low[r]), load_some(b + r * stride + n, count - n), total);
    store_some(y + n, load_some(y + n, count - n) + total, count - n);
  }
}

// Outputs in blocks whose part of B stays in the cache.
template <class T, class Y> void expand(const Member& member, const AddLora& op) {
  constexpr int64_t BLOCK = 256;
  const int64_t blocks = ceil_div(op.outputs, BLOCK);
  for (int64_t block = member.part(blocks).first; block < member.part(blocks).end; block++)
    for (int64_t part = 0; part < op.parts; part++) {
      const int64_t first = std::max(block * BLOCK, part ? op.ends[part - 1] : 0), end = std::min((block + 1) * BLOCK, op.ends[part]);
      for (int64_t i = 0; first < end && i < op.rows; i++) {
        const int64_t row = op.order[i], slot = op.slots[row];
        if (slot < 0) continue;
        const T* b = (const T*)op.b + slot * op.rank * op.outputs + first;
        const float* low = op.low + (row * op.parts + part) * op.rank;
        expand((Y*)op.y + row * op.outputs + first, low, b, op.rank, op.outputs, end - first);
      }
    }
}
}  // namespace

extern "C" void mtp_add_lora(const AddLora* op, int32_t threads) {
  const int64_t work = op->rows * op->rank * (op->parts * op->inputs + op->outputs);
  parallel(worth(threads, work), [&](const Member& member) {
    by_type(op->type, [&](auto number) {
      using T = decltype(number);
      shrink<T>(member, *op);
      member.wait();
      by_type(op->y_type, [&](auto out) { expand<T, decltype(out)>(member, *op); });
    });
  });
}
}  // namespace mtp
