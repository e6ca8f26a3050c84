// Work on the pages themselves: slots that move, and the rows that are kept for the last token of each page.
// Reference: mtpserve_kernels/cache/reference.py.
#include "threads.h"

namespace mtp {
namespace {
// body(i) for i < total, by as many threads as `bytes` pay for.
template <class Body> void each(int threads, int64_t bytes, int64_t total, const Body& body) {
  parallel(worth(threads, bytes), [&](const Member& member) {
    for (int64_t i = member.part(total).first; i < member.part(total).end; i++) body(i);
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

// rows [seats * room, row_bytes], seats and index [count], hidden [count, row_bytes]: row seats[i] * room + index[i] modulo room becomes
// hidden[i].
void mtp_keep(char* rows, int64_t room, int64_t row_bytes, const int64_t* seats, const int64_t* index, const char* hidden, int64_t count,
              int32_t threads) {
  each(threads, count * row_bytes, count,
       [&](int64_t i) { std::memcpy(rows + (seats[i] * room + index[i] % room) * row_bytes, hidden + i * row_bytes, row_bytes); });
}

// rows [pages, row_bytes], slots [count], hidden [count, row_bytes]: rows[page] becomes the hidden row whose slot is the page's last. The
// last page pads batches, and its row stays as it is.
void mtp_store_boundary(char* rows, int64_t pages, int64_t row_bytes, const int64_t* slots, const char* hidden, int64_t count,
                        int64_t page_size, int32_t threads) {
  each(threads, count / page_size * row_bytes, count, [&](int64_t i) {
    const int64_t page = slots[i] / page_size;
    if (slots[i] % page_size == page_size - 1 && page < pages - 1) std::memcpy(rows + page * row_bytes, hidden + i * row_bytes, row_bytes);
  });
}
}
}  // namespace mtp
