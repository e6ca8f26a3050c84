// What ranks.h has, for tensors.
#include "ranks.h"

namespace mtp {
extern "C" {

// → the bytes of memory that so many ranks exchange chunks through.
void mtp_exchange_bytes(int64_t ranks, int64_t* bytes, int32_t) { *bytes = sizeof(Exchange) + 2 * ranks * CHUNK; }

// Nobody waits for the others any more.
void mtp_break_exchange(Exchange* exchange, int32_t) { exchange->broken.store(1, std::memory_order_relaxed); }

// x [count] of `type`, bfloat16 or float32 → its sum over all ranks.
void mtp_sum_ranks(Rank* own, void* x, int64_t count, int32_t type, int32_t threads) {
  by_type((Type)type, [&](auto number) {
    using T = decltype(number);
    parallel(worth(threads, count * own->ranks), [&](const Member& member) { sum(member, *own, (T*)x, count); });
  });
}

// x [rows, bytes] → out [rows, ranks, bytes].
void mtp_gather_ranks(Rank* own, const char* x, char* out, int64_t rows, int64_t bytes, int32_t) {
  const int64_t total = rows * bytes;
  for (int64_t first = 0; first < total && own->done >= 0; first += CHUNK) {
    const int64_t size = std::min(CHUNK, total - first), number = own->done;
    std::memcpy(own->exchange->chunk(number, own->ranks, own->rank), x + first, size);
    own->exchange->published[own->rank].chunks.store(number + 1, std::memory_order_release);
    own->done = own->wait_for(number) ? number + 1 : -1;
    for (int64_t rank = 0; rank < own->ranks && own->done >= 0; rank++) {
      const char* chunk = own->exchange->chunk(number, own->ranks, rank);
      // Row by row, as far as they are in this chunk.
      for (int64_t i = 0, length; i < size; i += length) {
        const int64_t row = (first + i) / bytes, column = (first + i) % bytes;
        length = std::min(bytes - column, size - i);
        std::memcpy(out + (row * own->ranks + rank) * bytes + column, chunk + i, length);
      }
    }
  }
}
}
}  // namespace mtp
