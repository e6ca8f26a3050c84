// Reference: mtpserve_kernels/cache/reference.py.
#include "cache.h"

#include <vector>

namespace mtp {
namespace {

constexpr int64_t SMALL = 1 << 16;  // bytes that are moved before a second thread has started

// Of `size` > 0, rounded down: what is left is never negative.
int64_t floor_div(int64_t a, int64_t size) { return a / size - (a % size < 0); }

}  // namespace

void compact(const Member& member, const Pool& pool, const int64_t* source, const int64_t* target, int64_t requests, int64_t depth) {
  thread_local std::vector<char> room;
  room.resize(depth * pool.slot_bytes);
  const Range mine = member.part(pool.layers * requests);
  for (int64_t i = mine.first; i < mine.end; i++) {
    char* layer = pool.data + i / requests * pool.layer_stride;
    const int64_t *from = source + i % requests * depth, *to = target + i % requests * depth;
    auto moves = [&](int64_t j) { return from[j] != to[j] && from[j] >= 0; };
    // All are read before the first is written: a target may be a source of another move.
    for (int64_t j = 0; j < depth; j++)
      if (moves(j)) std::memcpy(&room[j * pool.slot_bytes], layer + from[j] * pool.slot_stride, pool.slot_bytes);
    for (int64_t j = 0; j < depth; j++)
      if (moves(j)) std::memcpy(layer + to[j] * pool.slot_stride, &room[j * pool.slot_bytes], pool.slot_bytes);
  }
}

void slots(const Member& member, const int64_t* page_table, int64_t stride, int64_t columns, const int64_t* seats, const int64_t* index,
           int64_t count, int64_t page_size, int64_t* out) {
  const Range mine = member.part(count);
  for (int64_t i = mine.first; i < mine.end; i++) {
    const int64_t column = floor_div(index[i], page_size), place = index[i] - column * page_size;
    out[i] = page_table[seats[i] * stride + (column < 0 ? column + columns : column)] * page_size + place;
  }
}

void store_boundary(const Member& member, char* rows, int64_t pages, int64_t row_bytes, const int64_t* slots, const char* hidden,
                    int64_t count, int64_t page_size) {
  const Range mine = member.part(count);
  for (int64_t i = mine.first; i < mine.end; i++) {
    const int64_t page = floor_div(slots[i], page_size);
    if (slots[i] - page * page_size == page_size - 1 && page >= 0 && page < pages - 1)
      std::memcpy(rows + page * row_bytes, hidden + i * row_bytes, row_bytes);
  }
}

}  // namespace mtp

extern "C" {

void mtp_compact(void* data, int64_t layers, int64_t layer_stride, int64_t slot_stride, int64_t slot_bytes, const int64_t* source,
                 const int64_t* target, int64_t requests, int64_t depth, int32_t threads) {
  const mtp::Pool pool{(char*)data, layers, layer_stride, slot_stride, slot_bytes};
  const bool small = layers * requests * depth * slot_bytes < mtp::SMALL;
  mtp::parallel(small ? 1 : threads, [&](const mtp::Member& member) { mtp::compact(member, pool, source, target, requests, depth); });
}

// The index of a whole step, ten thousand tokens, takes less time than a second thread to start.
void mtp_slots(const int64_t* page_table, int64_t stride, int64_t columns, const int64_t* seats, const int64_t* index, int64_t count,
               int64_t page_size, int64_t* out, int32_t) {
  mtp::parallel(1,
                [&](const mtp::Member& member) { mtp::slots(member, page_table, stride, columns, seats, index, count, page_size, out); });
}

void mtp_store_boundary(void* rows, int64_t pages, int64_t row_bytes, const int64_t* slots, const void* hidden, int64_t count,
                        int64_t page_size, int32_t threads) {
  const bool small = count / page_size * row_bytes < mtp::SMALL;
  mtp::parallel(small ? 1 : threads, [&](const mtp::Member& member) {
    mtp::store_boundary(member, (char*)rows, pages, row_bytes, slots, (const char*)hidden, count, page_size);
  });
}
}
