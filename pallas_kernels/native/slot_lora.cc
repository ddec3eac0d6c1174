// onto[m] + scale[m] (x[m] a[w]^T) b[w], w the row's slot: rows of one slot together, each adapter read once, from where it lies.

#include <algorithm>
#include <numeric>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kRows = 6, kVectors = 4;
constexpr int64_t kTask = 24;  // rows of one slot that a thread takes at once, at most

// h[i * ranks + r] = scale[i] (x[i] . a[r]) for C rows and S ranks.
template <int C, int S>
void inner(const float* const* x, const float* a, int64_t D, const float* scale, float* h, int64_t ranks) {
  Vec acc[C][S] = {};
  int64_t d = 0;
  for (; d + kLanes <= D; d += kLanes) {
    Vec w[S];
    for (int s = 0; s < S; ++s) w[s] = load(a + s * D + d);
    for (int c = 0; c < C; ++c) {
      Vec at = load(x[c] + d);
      for (int s = 0; s < S; ++s) acc[c][s] = multiply_add(at, w[s], acc[c][s]);
    }
  }
  for (int c = 0; c < C; ++c)
    for (int s = 0; s < S; ++s) {
      float sum = total(acc[c][s]);
      for (int64_t e = d; e < D; ++e) sum = std::fma(x[c][e], a[s * D + e], sum);
      h[c * ranks + s] = scale[c] * sum;
    }
}

template <int C>
void shrink(const float* const* x, const float* a, int64_t D, int64_t ranks, const float* scale, float* h) {
  constexpr int kRanks = columns_beside(C) == 3 ? 2 : columns_beside(C);  // ranks are mostly powers of two
  int64_t r = 0;
  for (; r + kRanks <= ranks; r += kRanks) inner<C, kRanks>(x, a + r * D, D, scale, h + r, ranks);
  for (; r < ranks; ++r) inner<C, 1>(x, a + r * D, D, scale, h + r, ranks);
}

template <int C>
void expand(const float* h, const float* b, int64_t ranks, int64_t F, const float* const* onto, float* const* out) {
  int64_t f = 0;
  auto wide = [&](auto vectors) {
    constexpr int V = decltype(vectors)::value;
    Vec acc[C][V] = {};
    multiply(acc, h, ranks, b + f, F, ranks);
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) store(out[c] + f + v * kLanes, load(onto[c] + f + v * kLanes) + acc[c][v]);
    f += V * kLanes;
  };
  while (f + kVectors * kLanes <= F) wide(std::integral_constant<int, kVectors>());
  while (f + kLanes <= F) wide(std::integral_constant<int, 1>());
  for (; f < F; ++f)
    for (int c = 0; c < C; ++c) {
      float sum = 0;
      for (int64_t r = 0; r < ranks; ++r) sum = std::fma(h[c * ranks + r], b[r * F + f], sum);
      out[c][f] = onto[c][f] + sum;
    }
}

struct Adapter {
  const float *a, *b;
  int64_t D, F, ranks;
};

template <int C>
void add(const Adapter& w, const float* const* x, const float* scale, const float* const* onto, float* const* out, float* h) {
  shrink<C>(x, w.a, w.D, w.ranks, scale, h);
  expand<C>(h, w.b, w.ranks, w.F, onto, out);
}

ffi::Error SlotLora(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> a, ffi::Buffer<ffi::F32> b,
                    ffi::Buffer<ffi::F32> onto, ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> first,
                    ffi::ResultBuffer<ffi::F32> out) {
  int64_t M = x.dimensions()[0], D = x.dimensions()[1], W = a.dimensions()[0], ranks = a.dimensions()[1], F = b.dimensions()[2];
  const float *xs = x.typed_data(), *ys = onto.typed_data();
  const int32_t* slots = slot.typed_data();
  float* zs = out->typed_data();
  if (zs != ys) std::memcpy(zs, ys, M * F * sizeof(float));  // XLA could not give the result the place of what is added to
  int64_t base = first.typed_data()[0];
  std::vector<int64_t> order;
  for (int64_t m = 0; m < M; ++m)
    if (slots[m] >= 0 && base + slots[m] < W) order.push_back(m);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return slots[i] < slots[j]; });
  struct Task {
    int64_t begin, end;
  };
  std::vector<Task> runs, tasks;  // runs of one slot, and what threads take of them: 32 rows of one slot are 16 for each of two
  for (int64_t i = 0, n = order.size(), j; i < n; i = j) {
    for (j = i + 1; j < n && slots[order[j]] == slots[order[i]];) ++j;
    runs.push_back({i, j});
  }
  int64_t each = std::max<int64_t>(1, pool.num_threads() / std::max<int64_t>(1, runs.size()));
  for (auto [begin, end] : runs) {
    int64_t count = end - begin, parts = std::max((count + kTask - 1) / kTask, std::min(each, count / kRows));
    for (int64_t i = 0; i < parts; ++i) tasks.push_back({begin + count * i / parts, begin + count * (i + 1) / parts});
  }
  int64_t work = order.size() * ranks * (D + F) + tasks.size() * ranks * (D + F) * 8;
  over_tasks(pool, tasks.size(), work > (1 << 18), [&](int64_t t) {
    auto [begin, end] = tasks[t];
    int64_t w = base + slots[order[begin]];
    Adapter adapter{a.typed_data() + w * ranks * D, b.typed_data() + w * ranks * F, D, F, ranks};
    thread_local std::vector<float> h;
    h.resize(kRows * ranks);
    int64_t count = end - begin, blocks = (count + kRows - 1) / kRows;
    for (int64_t i = 0; i < blocks; ++i) {
      int64_t at = begin + count * i / blocks, C = begin + count * (i + 1) / blocks - at;
      const float *in[kRows], *on[kRows];
      float *to[kRows], by[kRows];
      for (int64_t c = 0; c < C; ++c) {
        int64_t m = order[at + c];
        in[c] = xs + m * D, on[c] = zs + m * F, to[c] = zs + m * F, by[c] = scale.typed_data()[m];
      }
      switch (C) {
        case 1: add<1>(adapter, in, by, on, to, h.data()); break;
        case 2: add<2>(adapter, in, by, on, to, h.data()); break;
        case 3: add<3>(adapter, in, by, on, to, h.data()); break;
        case 4: add<4>(adapter, in, by, on, to, h.data()); break;
        case 5: add<5>(adapter, in, by, on, to, h.data()); break;
        default: add<6>(adapter, in, by, on, to, h.data());
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_slot_lora, SlotLora,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
