// A loop over tasks by XLA's own threads.

#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

inline void pause_thread() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls work(i) for all i below n. The caller takes tasks as the others do and waits only for those that another thread has begun: what
// the pool never came to run is done here, so that a pool whose threads all wait in calls like this one cannot lock up.
template <typename Work>
void over_tasks(xla::ffi::ThreadPool& pool, int64_t n, bool worth_threads, const Work& work) {
  int64_t helpers = worth_threads ? std::min<int64_t>(pool.num_threads(), n) - 1 : 0;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; ++i) work(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all;
  };
  auto shared = std::make_shared<Shared>();
  const Work* borrowed = &work;  // used only for tasks below n, which end before this call does
  auto take = [shared, n, borrowed] {
    int64_t mine = 0;
    for (int64_t i; (i = shared->next.fetch_add(1)) < n; ++mine) (*borrowed)(i);
    if (mine && shared->done.fetch_add(mine) + mine == n) {
      std::lock_guard<std::mutex> hold(shared->mutex);
      shared->all.notify_all();
    }
  };
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule(decltype(take)(take));
  take();
  for (int spin = 0; spin < 4000 && shared->done.load() < n; ++spin) pause_thread();
  std::unique_lock<std::mutex> hold(shared->mutex);
  shared->all.wait(hold, [&] { return shared->done.load() == n; });
}
