// Work on the pages themselves: slots that move, slots of tokens, and the rows that are kept for the last token of each page.
#pragma once
#include "threads.h"

namespace mtp {

// A store's keys or values, [layers, slots, slot_bytes]; the strides are in bytes.
struct Pool {
  char* data;
  int64_t layers, layer_stride, slot_stride, slot_bytes;
};

// source and target [requests, depth]: in every layer slot target[r, j] becomes what source[r, j] was. A request's targets are distinct
// and its own; they may be sources of its other moves. A pair of equal slots, or one with a negative source, moves nothing.
void compact(const Member& member, const Pool& pool, const int64_t* source, const int64_t* target, int64_t requests, int64_t depth);

// page_table [seats, columns] with `stride` numbers from row to row; seats, index and out [count]: the slot of each request's token
// `index`. Like torch, -1 is in the last column's page.
void slots(const Member& member, const int64_t* page_table, int64_t stride, int64_t columns, const int64_t* seats, const int64_t* index,
           int64_t count, int64_t page_size, int64_t* out);

// rows [pages, row_bytes], slots [count], hidden [count, row_bytes]: rows[page] becomes the hidden row whose slot is the page's last. The
// last page pads batches, and its row stays as it is.
void store_boundary(const Member& member, char* rows, int64_t pages, int64_t row_bytes, const int64_t* slots, const char* hidden,
                    int64_t count, int64_t page_size);

}  // namespace mtp
