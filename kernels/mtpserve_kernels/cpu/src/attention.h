// Attention of ragged spans, a chain or a tree, over pages in place. What a row sees: ../../attention/span.py.
#pragma once
#include "threads.h"

namespace mtp {
// A planned batch for the layers of one store: what differs from layer to layer is the addresses of its keys and values.
struct Spans {
  const int64_t* page_table;       // [seats, table_stride]
  const int64_t* seats;            // [requests]
  const int64_t* query_start_loc;  // [requests + 1]
  const int64_t* seq_lens;         // [requests]
  const int64_t* index;            // [rows]
  const int64_t* tree_bits;        // [rows] or null
  const int64_t* tree_start;       // [requests] or null
  int64_t table_stride, requests, page_size, window, shift;
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t key_stride, key_head_stride, value_stride, value_head_stride;  // numbers from slot to slot and from head to head
  float scale;
  Type type;  // of keys and values
};

// q [rows, heads, key_dim] → out [rows, heads, value_dim]. The values may be a part of the keys. sinks [heads] or null: a score of each row
// that has no value. Called by all members; `next` is 0 at the start, and the members take pieces of work from it.
void attention(const Member& member, const Spans& spans, const Heads& q, const Heads& out, const void* keys, const void* values,
               const float* sinks, std::atomic<int64_t>& next);
}  // namespace mtp
