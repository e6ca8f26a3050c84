// torch's own threads (its OpenMP library) work on one op, or on a whole stack of layers, as a team.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "vec.h"

// Of the OpenMP library that torch brings, which has these names whether it is gcc's or another. By name, and not by pragma: no compiler
// needs OpenMP, and none links a second library, with threads of its own.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num() noexcept;
int omp_get_num_threads() noexcept;
}

namespace mtp {
// Waits for all members: spins a while, since the others arrive within microseconds, then gives the core away.
struct Barrier {
  static constexpr int SPINS = 4000;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> phase{0};

  void wait(int members) {
    if (members == 1) return;
    int now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++) {
      if (spins < SPINS) pause();
      else sched_yield();
    }
  }
};

// Room for `size` numbers; what was in it is lost.
template <class T> T* room(std::vector<T>& numbers, int64_t size) {
  if ((int64_t)numbers.size() < size) numbers.resize(size);
  return numbers.data();
}

struct Range {
  int64_t first, end;
};

// One thread of a team. What it computes is chosen by `index` and `size` alone, and no result depends on either.
struct Member {
  int index, size;
  Barrier* barrier;

  void wait() const { barrier->wait(size); }

  // For a piece of work that this member does by itself.
  Member alone() const { return {0, 1, barrier}; }

  // This member's part of `total` equal pieces of work.
  Range part(int64_t total) const { return {total * index / size, total * (index + 1) / size}; }
};

// Threads that `work` multiplications pay for: waking a team costs some microseconds.
inline int worth(int threads, int64_t work) { return (int)std::clamp<int64_t>(work / (1 << 17), 1, threads); }

// body(member) on `threads` threads.
template <class Body> void parallel(int threads, const Body& body) {
  struct Team {
    const Body& body;
    Barrier barrier;
  } team{body, {}};
  if (threads <= 1) return body(Member{0, 1, &team.barrier});
  const auto member = [](void* data) {
    Team& own = *(Team*)data;
    own.body(Member{omp_get_thread_num(), omp_get_num_threads(), &own.barrier});
  };
  GOMP_parallel(member, &team, threads, 0);
}
}  // namespace mtp
