// Attention of rows' queries to the pages that their tables name: each page is read once, from where it lies, by all queries of a head.
// Softmax goes page by page, with a running maximum (FlashAttention, arXiv 2205.14135, Algorithm 1).

#include <algorithm>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kPage = 32, kRun = 128, kRunPages = kRun / kPage;
constexpr int kRows = 6, kScores = kPage / kLanes, kVectors = 4;
constexpr float kMasked = -1e30f;

// What the queries of one row and head have so far.
struct State {
  float *top, *total, *value;
};

// C queries and the n positions of a page that hold a token.
template <int C>
void page(const float* q, const float* keys, const float* v, int64_t stride_v, int64_t H, int64_t n, float scale, State s) {
  float weights[C * kPage];
  {
    Vec acc[C][kScores] = {};
    multiply(acc, q, H, keys, kPage, H);
    for (int c = 0; c < C; ++c) {
      for (int i = 0; i < kScores; ++i) store(weights + c * kPage + i * kLanes, acc[c][i] * scale);
      float* w = weights + c * kPage;
      for (int64_t p = n; p < kPage; ++p) w[p] = kMasked;
      Vec best = load(w);
      for (int i = 1; i < kScores; ++i) {
        Vec x = load(w + i * kLanes);
        best = x > best ? x : best;
      }
      float top = s.top[c];
      for (int lane = 0; lane < kLanes; ++lane) top = best[lane] > top ? best[lane] : top;
      Vec sum = {};
      for (int i = 0; i < kScores; ++i) {
        Vec e = exp_of(load(w + i * kLanes) - top);
        store(w + i * kLanes, e);
        sum += e;
      }
      float keep = exp_of(spread(s.top[c] - top))[0];
      s.total[c] = s.total[c] * keep + total(sum);
      s.top[c] = top;
      if (keep != 1.0f)
        for (int64_t h = 0; h < H; ++h) s.value[c * H + h] *= keep;
    }
  }
  int64_t h = 0;
  auto wide = [&](auto vectors) {
    constexpr int V = decltype(vectors)::value;
    Vec acc[C][V];
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < V; ++i) acc[c][i] = load(s.value + c * H + h + i * kLanes);
    multiply(acc, weights, kPage, v + h, stride_v, n);
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < V; ++i) store(s.value + c * H + h + i * kLanes, acc[c][i]);
    h += V * kLanes;
  };
  while (h + kVectors * kLanes <= H) wide(std::integral_constant<int, kVectors>());
  while (h < H) wide(std::integral_constant<int, 1>());
}

ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                          ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> prefix,
                          ffi::Buffer<ffi::S32> own, ffi::Buffer<ffi::S32> first, float scale, ffi::ResultBuffer<ffi::F32> top,
                          ffi::ResultBuffer<ffi::F32> total, ffi::ResultBuffer<ffi::F32> value) {
  auto dims = q.dimensions(), pools = k.dimensions();
  int64_t B = dims[0], K = dims[1], M = dims[2], H = dims[3], L = pools[0], U = pools[1], X = pools[4];
  int64_t entries = table.dimensions()[1], at = std::clamp<int64_t>(layer.typed_data()[0], 0, L - 1) * U;
  int64_t positions = 0;
  for (int64_t b = 0; b < B; ++b) positions += prefix.typed_data()[b] + own.typed_data()[b];
  over_tasks(pool, B * K, positions * K * M * H > (1 << 16), [&](int64_t task) {
    int64_t b = task / K, head = task % K;
    const float* queries = q.typed_data() + task * M * H;
    State all{top->typed_data() + task * M, total->typed_data() + task * M, value->typed_data() + task * M * H};
    std::fill_n(all.top, M, kMasked);
    std::fill_n(all.total, M, 0.0f);
    std::fill_n(all.value, M * H, 0.0f);
    int64_t of_prefix = prefix.typed_data()[b], of_own = own.typed_data()[b];
    int64_t runs_of_prefix = (of_prefix + kRun - 1) / kRun, runs = runs_of_prefix + (of_own + kRun - 1) / kRun;
    thread_local std::vector<float> turned;
    turned.resize(H * kPage);
    for (int64_t run = first.typed_data()[b]; run < runs; ++run) {
      int64_t there = run < runs_of_prefix ? of_prefix - kRun * run : of_own - kRun * (run - runs_of_prefix);
      for (int64_t i = 0; i < kRunPages && there > i * kPage; ++i) {
        int64_t entry = run * kRunPages + i, n = std::min(kPage, there - i * kPage);
        if (entry >= entries) break;
        int64_t number = std::clamp<int64_t>(table.typed_data()[b * entries + entry], 0, U - 1);
        int64_t begin = ((at + number) * K + head) * kPage * X;
        const float *keys = k.typed_data() + begin, *values = v.typed_data() + begin;
        // Pages lie anywhere: its values and the next page's keys come while its own keys are turned.
        bool more = i + 1 < kRunPages && there > (i + 1) * kPage && entry + 1 < entries;
        int64_t after = more ? table.typed_data()[b * entries + entry + 1] : number;
        const float* next = k.typed_data() + ((at + std::clamp<int64_t>(after, 0, U - 1)) * K + head) * kPage * X;
        for (int64_t p = 0; p < kPage; p += kLanes)
          for (int64_t h = 0; h < H; h += kLanes) {
            for (int64_t j = 0; j < kLanes; ++j) {
              __builtin_prefetch(values + (p + j) * X + h, 0, 3);
              if (next != keys) __builtin_prefetch(next + (p + j) * X + h, 0, 3);
            }
            transpose(keys + p * X + h, X, turned.data() + h * kPage + p, kPage);
          }
        int64_t blocks = (M + kRows - 1) / kRows;
        for (int64_t j = 0; j < blocks; ++j) {
          int64_t m = M * j / blocks, C = M * (j + 1) / blocks - m;
          State s{all.top + m, all.total + m, all.value + m * H};
          auto of = [&](auto count) { page<decltype(count)::value>(queries + m * H, turned.data(), values, X, H, n, scale, s); };
          switch (C) {
            case 1: of(std::integral_constant<int, 1>()); break;
            case 2: of(std::integral_constant<int, 2>()); break;
            case 3: of(std::integral_constant<int, 3>()); break;
            case 4: of(std::integral_constant<int, 4>()); break;
            case 5: of(std::integral_constant<int, 5>()); break;
            default: of(std::integral_constant<int, 6>());
          }
        }
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_paged_attention, PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
