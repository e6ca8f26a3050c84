// torch's own threads (its OpenMP library) work on one op, or on a whole stack of layers, as a team.
#pragma once
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
// Waits for all members: spins a while, since the others arrive within microseconds, then sleeps. A member that is later has lost its core
// to another process. A core whose thread sleeps is idle, and the system moves that member to it; one whose thread only yields is not.
struct Barrier {
  static constexpr int SPINS = 4000;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> phase{0};
  alignas(64) std::atomic<int> left{0};

  void wait(int members) {
    if (members == 1) return;
    int now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      phase.notify_all();
      return;
    }
    until(phase, [now](int value) { return value != now; });
  }

  // Once, at the end of the work: member 0 waits for all others. They do not wait, so that none of them has to be woken.
  void leave(int index, int members) {
    if (members == 1) return;
    if (index == 0) return until(left, [members](int value) { return value == members - 1; });
    if (left.fetch_add(1, std::memory_order_acq_rel) == members - 2) left.notify_one();
  }

 private:
  template <class Done> static void until(const std::atomic<int>& number, Done done) {
    int value = number.load(std::memory_order_acquire);
    for (int spins = 0; !done(value); spins++) {
      if (spins < SPINS) pause();
      else number.wait(value, std::memory_order_acquire);
      value = number.load(std::memory_order_acquire);
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
    const Member self{omp_get_thread_num(), omp_get_num_threads(), &own.barrier};
    own.body(self);
    own.barrier.leave(self.index, self.size);  // OpenMP's own barrier spins for milliseconds
  };
  GOMP_parallel(member, &team, threads, 0);
}
}  // namespace mtp
