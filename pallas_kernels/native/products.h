// What a call multiplies, and its parts as tasks.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "threads.h"

// Matrices of the same rows, as B has their weights, [D, F] or of a table [F, D], with their results [M, F].
template <typename B>
struct Products {
  struct One {
    const B* w;
    int64_t F;
    float* out;
  };
  std::vector<One> all;
  const float* x;
  int64_t M, D, room;  // rows in use, their width, and all rows

  // Calls work(one, p) for all parts of `width` columns, a task each; rows that are not in use get zeros.
  template <typename Work>
  void by_parts(xla::ffi::ThreadPool& pool, int64_t width, const Work& work) const {
    int64_t tasks = 0, columns = 0;
    for (const One& one : all) tasks += (one.F + width - 1) / width, columns += one.F;
    over_tasks(pool, tasks, M * D * columns > (1 << 16), [&](int64_t p) {
      for (const One& one : all) {
        int64_t parts = (one.F + width - 1) / width;
        if (p >= parts) {
          p -= parts;
          continue;
        }
        int64_t first = p * width, columns = std::min(width, one.F - first);
        for (int64_t m = M; m < room; ++m) std::memset(one.out + m * one.F + first, 0, columns * sizeof(float));
        return work(one, p);
      }
    });
  }
};
