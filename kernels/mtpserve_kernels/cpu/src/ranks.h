// The processes of one machine that compute a model together exchange numbers through memory that all of them have mapped.
//
// Each rank writes a chunk of its own, publishes it, waits for the others' and reads them. There are two places for chunks, in turn: a rank
// writes chunk n + 2 over chunk n only after it has seen all others publish n + 1, which they do after they have read n.
#pragma once
#include <time.h>

#include "threads.h"

namespace mtp {
constexpr int64_t MOST_RANKS = 64, CHUNK = 1 << 18;  // bytes of a chunk

// At the start of the memory, which is zeros at first; the chunks follow: [2, ranks, CHUNK].
struct Exchange {
  struct alignas(64) Count {
    std::atomic<int64_t> chunks;
  };
  Count published[MOST_RANKS];
  alignas(64) std::atomic<int32_t> broken;  // a rank is gone: nobody waits any more

  char* chunk(int64_t number, int64_t ranks, int64_t rank) { return (char*)(this + 1) + (number % 2 * ranks + rank) * CHUNK; }
};
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(Exchange) % 64 == 0);

// What one rank knows of the exchange. `done`: chunks that were exchanged; negative once that has failed.
struct Rank {
  Exchange* exchange;
  int64_t rank, ranks, milliseconds;
  int64_t done;

  // Others arrive within microseconds, unless they share a core with this one: then it is given away. False: a rank is gone, or does not
  // come in time.
  bool wait_for(int64_t chunk) const {
    static constexpr int SPINS = 4000, LOOKS = 256;  // until the core is given away; from one look at the clock to the next
    int64_t until = 0;
    for (int64_t other = 0; other < ranks; other++)
      for (int64_t spins = 0; exchange->published[other].chunks.load(std::memory_order_acquire) <= chunk; spins++) {
        if (spins < SPINS) {
          pause();
          continue;
        }
        if (exchange->broken.load(std::memory_order_relaxed)) return false;
        sched_yield();
        if (spins % LOOKS) continue;
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        const int64_t now = time.tv_sec * 1000 + time.tv_nsec / 1000000;
        if (!until) until = now + milliseconds;
        if (now > until) return false;
      }
    return true;
  }
};

// The part of `count` numbers that a member works on: whole vectors.
inline Range vectors_of(const Member& member, int64_t count) {
  const Range part = member.part(ceil_div(count, LANES));
  return {part.first * LANES, std::min(count, part.end * LANES)};
}

// x [count] → the sum over all ranks in their order, in float32, rounded once. All members of a team call it. After a failure x is void.
template <class T> void sum(const Member& member, Rank& own, T* x, int64_t count) {
  static constexpr int64_t EACH = CHUNK / sizeof(T);
  for (int64_t first = 0; first < count && own.done >= 0; first += EACH) {
    const int64_t size = std::min(EACH, count - first), number = own.done;
    const Range part = vectors_of(member, size);
    const auto chunk = [&](int64_t rank) { return (T*)own.exchange->chunk(number, own.ranks, rank); };
    if (part.first < part.end) std::memcpy(chunk(own.rank) + part.first, x + first + part.first, (part.end - part.first) * sizeof(T));
    member.wait();
    if (member.index == 0) {
      own.exchange->published[own.rank].chunks.store(number + 1, std::memory_order_release);
      own.done = own.wait_for(number) ? number + 1 : -1;
    }
    member.wait();
    for (int64_t i = part.first; i < part.end && own.done >= 0; i += LANES) {
      Floats total = load_some(chunk(0) + i, size - i);
      for (int64_t rank = 1; rank < own.ranks; rank++) total += load_some(chunk(rank) + i, size - i);
      store_some(x + first + i, total, size - i);
    }
    member.wait();  // the last one's part of x, and of what all have read
  }
}
}  // namespace mtp
