// Work on the pages themselves: slots that move, slots of tokens, and the rows that are kept for the last token of each page.
// Reference: mtpserve_kernels/cache/reference.py.
#include "threads.h"

namespace mtp {
namespace {
constexpr int64_t SMALL = 1 << 16;  // bytes that are moved before a second thread has started

// Of `size` > 0, rounded down: what is left is never negative.
int64_t floor_div(int64_t a, int64_t size) { return a / size - (a % size < 0); }

// body(i) for i < total, by all threads where `bytes` are enough.
template <class Body> void each(int threads, int64_t bytes, int64_t total, const Body& body) {
  parallel(bytes < SMALL ? 1 : threads, [&](const Member& member) {
    const Range mine = member.part(total);
    for (int64_t i = mine.first; i < mine.end; i++) body(i);
  });
}
}  // namespace

extern "C" {

// data [layers, slots, slot_bytes], the strides in bytes; source and target [requests, depth]: in every layer slot target[r, j] becomes
// what source[r, j] was. A request's targets are distinct and its own; they may be sources of its other moves. A pair of equal slots, or
// one with a negative source, moves nothing.
void mtp_compact(char* data, int64_t layers, int64_t layer_stride, int64_t slot_stride, int64_t slot_bytes, const int64_t* source,
                 const int64_t* target, int64_t requests, int64_t depth, int32_t threads) {
  each(threads, layers * requests * depth * slot_bytes, layers * requests, [&](int64_t i) {
    thread_local std::vector<char> numbers;
    char *moved = room(numbers, depth * slot_bytes), *layer = data + i / requests * layer_stride;
    const int64_t *from = source + i % requests * depth, *to = target + i % requests * depth;
    auto moves = [&](int64_t j) { return from[j] != to[j] && from[j] >= 0; };
    // All are read before the first is written: a target may be a source of another move.
    for (int64_t j = 0; j < depth; j++)
      if (moves(j)) std::memcpy(moved + j * slot_bytes, layer + from[j] * slot_stride, slot_bytes);
    for (int64_t j = 0; j < depth; j++)
      if (moves(j)) std::memcpy(layer + to[j] * slot_stride, moved + j * slot_bytes, slot_bytes);
  });
}

// page_table [seats, columns] with `stride` numbers from row to row; seats, index and out [count]: the slot of each request's token
// `index`. Like torch, -1 is in the last column's page. The index of a whole step, ten thousand tokens, takes less time than a second
// thread to start.
void mtp_slots(const int64_t* page_table, int64_t stride, int64_t columns, const int64_t* seats, const int64_t* index, int64_t count,
               int64_t page_size, int64_t* out, int32_t) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t column = floor_div(index[i], page_size), place = index[i] - column * page_size;
    out[i] = page_table[seats[i] * stride + (column < 0 ? column + columns : column)] * page_size + place;
  }
}

// rows [pages, row_bytes], slots [count], hidden [count, row_bytes]: rows[page] becomes the hidden row whose slot is the page's last. The
// last page pads batches, and its row stays as it is.
void mtp_store_boundary(char* rows, int64_t pages, int64_t row_bytes, const int64_t* slots, const char* hidden, int64_t count,
                        int64_t page_size, int32_t threads) {
  each(threads, count / page_size * row_bytes, count, [&](int64_t i) {
    const int64_t page = floor_div(slots[i], page_size);
    if (slots[i] - page * page_size == page_size - 1 && page >= 0 && page < pages - 1)
      std::memcpy(rows + page * row_bytes, hidden + i * row_bytes, row_bytes);
  });
}
}
}  // namespace mtp
