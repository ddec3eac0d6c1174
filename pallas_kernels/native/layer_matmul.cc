// The rows in use of x [M, D], the first ones, times one layer of several w [L, D, F], or of the transposes of [L, F, D]: read from where
// they lie, once. The other rows get zeros.

#include <algorithm>
#include <cstring>
#include <vector>

#include "products.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kRows = 6, kVectors = 4;  // of a panel that many rows read
constexpr int kPanel = kVectors * kLanes;

// out[r][...] = a b for R rows and V vectors of columns, or the first `columns` of them.
template <int R, int V, typename B>
void block(const float* a, int64_t stride_a, const B* b, int64_t stride_b, int64_t K, float* out, int64_t stride_out, int64_t columns,
           int64_t ahead) {
  if (columns >= V * kLanes) {
    Vec acc[R][V] = {};
    ahead ? multiply_at_once(acc, a, stride_a, b, stride_b, K, ahead) : multiply(acc, a, stride_a, b, stride_b, K);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(out + r * stride_out + v * kLanes, acc[r][v]);
    return;
  }
  int64_t f = 0;
  for (; f + kLanes <= columns; f += kLanes) {
    Vec acc[R][1] = {};
    multiply(acc, a, stride_a, b + f, stride_b, K);
    for (int r = 0; r < R; ++r) store(out + r * stride_out + f, acc[r][0]);
  }
  for (; f < columns; ++f)
    for (int r = 0; r < R; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < K; ++k) sum = std::fma(a[r * stride_a + k], one(b + k * stride_b + f), sum);
      out[r * stride_out + f] = sum;
    }
}

// A matrix is read once, panel after panel, from where it lies. Not a few columns at a time where there are few registers: at strides
// that are multiples of 2 KB the first cache does not keep a panel for the second pass (AVX2, 8 rows: 3.5 ms where this takes 2.6).
template <int R, typename B>
void few(ffi::ThreadPool& pool, const Products<B>& of) {
  constexpr int V = R > 6 ? 3 : 4;
  constexpr int64_t width = V * kLanes;
  of.by_parts(pool, width, [&](const auto& one, int64_t p) {
    int64_t first = p * width;
    block<R, V>(of.x, of.D, one.w + first, one.F, of.D, one.out + first, one.F, one.F - first, 16);
  });
}

template <typename B>
void many(ffi::ThreadPool& pool, const Products<B>& of) {
  int64_t D = of.D, blocks = (of.M + kRows - 1) / kRows;
  of.by_parts(pool, kPanel, [&](const auto& product, int64_t p) {
    int64_t F = product.F, first = p * kPanel, columns = std::min<int64_t>(kPanel, F - first);
    // Rows read a panel again and again: side by side it is no work for the TLB, and converted once.
    thread_local std::vector<float> copy;
    copy.resize(D * kPanel);
    for (int64_t k = 0; k < D; ++k) {
      const B* row = product.w + first + k * F;
      const char* next = reinterpret_cast<const char*>(row + 16 * F);
      for (int at = 0; at < int(kPanel * sizeof(B)); at += 64) __builtin_prefetch(next + at, 0, 2);
      int64_t f = 0;
      for (; f + kLanes <= columns; f += kLanes) store(copy.data() + k * kPanel + f, load(row + f));
      for (; f < columns; ++f) copy[k * kPanel + f] = one(row + f);
    }
    for (int64_t i = 0; i < blocks; ++i) {
      // Blocks as equal as they can be: fourteen rows are 4, 5 and 5.
      int64_t at = of.M * i / blocks;
      const float* a = of.x + at * D;
      float* y = product.out + at * F + first;
      switch (of.M * (i + 1) / blocks - at) {
        case 4: block<4, kVectors>(a, D, copy.data(), kPanel, D, y, F, columns, 0); break;
        case 5: block<5, kVectors>(a, D, copy.data(), kPanel, D, y, F, columns, 0); break;
        default: block<6, kVectors>(a, D, copy.data(), kPanel, D, y, F, columns, 0);
      }
    }
  });
}

template <typename B>
void multiply_all(ffi::ThreadPool& pool, const Products<B>& of) {
  switch (of.M) {
    case 0: return of.by_parts(pool, 1024, [](const auto&, int64_t) {});
    case 1: return few<1>(pool, of);
    case 2: return few<2>(pool, of);
    case 3: return few<3>(pool, of);
    case 4: return few<4>(pool, of);
    case 5: return few<5>(pool, of);
    case 6: return few<6>(pool, of);
    case 7: return few<7>(pool, of);
    case 8: return few<8>(pool, of);
    default: return many(pool, of);
  }
}

constexpr int kEntries = 128, kTogether = 24;  // rows of a table that are a task's, and that all rows are multiplied by in turn
constexpr int kTall = kRegisters > 16 ? 8 : 4;   // rows that read a table together

// Entries of a table, at most 8, whose sums for R rows fit in registers; kTogether is a multiple of it.
constexpr int entries_beside(int R) {
  int fit = (kRegisters - 1) / (R + 1);
  return R == 1 ? 1 : fit >= 8 ? 8 : fit >= 6 ? 6 : fit < 1 ? 1 : fit == 5 ? 4 : fit;
}

// out[r][e] = a[r] . b[e] for R rows and E entries of a table: lanes along D, added up at the end.
template <int R, int E, bool kAhead, typename B>
void dots(const float* a, const B* b, int64_t D, float* out, int64_t stride_out) {
  Vec acc[R][E] = {};
  int64_t d = 0, later = (E == 1 ? 24 : 6) * D;  // what is fetched ahead; further where one row takes one entry after the other
  for (; d + kLanes <= D; d += kLanes) {
    Vec w[E];
    for (int e = 0; e < E; ++e) {
      w[e] = load(b + e * D + d);
      if (kAhead) __builtin_prefetch(b + e * D + d + later, 0, 2);
    }
    for (int r = 0; r < R; ++r) {
      Vec x = in_register(load(a + r * D + d));
      for (int e = 0; e < E; ++e) acc[r][e] = multiply_add(x, w[e], acc[r][e]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int e = 0; e < E; ++e) {
      float sum = total(acc[r][e]);
      for (int64_t k = d; k < D; ++k) sum = std::fma(a[r * D + k], one(b + e * D + k), sum);
      out[r * stride_out + e] = sum;
    }
}

template <int R, typename B>
void entries(int64_t count, const float* a, const B* b, int64_t D, float* out, int64_t stride_out, bool ahead) {
  constexpr int E = entries_beside(R);
  int64_t e = 0;
  for (; e + E <= count; e += E)
    ahead ? dots<R, E, true>(a, b + e * D, D, out + e, stride_out) : dots<R, E, false>(a, b + e * D, D, out + e, stride_out);
  for (; e < count; ++e) dots<R, 1, false>(a, b + e * D, D, out + e, stride_out);
}

// x times the transpose of tables [F, D], whose rows are contiguous: an unembedding. kTall rows at a time read them.
template <typename B>
void multiply_all_transposed(ffi::ThreadPool& pool, const Products<B>& of) {
  int64_t D = of.D, blocks = (of.M + kTall - 1) / kTall;
  of.by_parts(pool, kEntries, [&](const auto& one, int64_t p) {
    int64_t F = one.F, f = p * kEntries, count = std::min<int64_t>(kEntries, F - f);
    int64_t step = blocks > 1 ? kTogether : count;  // what several blocks of rows read stays in the first cache
    for (int64_t g = 0; g < count; g += step)
      for (int64_t i = 0; i < blocks; ++i) {
        int64_t at = of.M * i / blocks, n = std::min(step, count - g);
        const float* a = of.x + at * D;
        const B* b = one.w + (f + g) * D;
        float* y = one.out + at * F + f + g;
        bool ahead = i == 0;
        switch (of.M * (i + 1) / blocks - at) {
          case 1: entries<1>(n, a, b, D, y, F, ahead); break;
          case 2: entries<2>(n, a, b, D, y, F, ahead); break;
          case 3: entries<3>(n, a, b, D, y, F, ahead); break;
          case 4: entries<4>(n, a, b, D, y, F, ahead); break;
          case 5: entries<5>(n, a, b, D, y, F, ahead); break;
          case 6: entries<6>(n, a, b, D, y, F, ahead); break;
          case 7: entries<7>(n, a, b, D, y, F, ahead); break;
          default: entries<8>(n, a, b, D, y, F, ahead);
        }
      }
  });
}

ffi::Error LayerMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> rows,
                       ffi::RemainingArgs w, ffi::RemainingRets out, bool transposed) {
  auto run = [&](auto kind) -> ffi::Error {
    using B = decltype(kind);
    int64_t room = x.dimensions()[0], M = std::clamp<int64_t>(rows.typed_data()[0], 0, room);
    Products<B> of{{}, x.typed_data(), M, x.dimensions()[1], room};
    for (size_t i = 0; i < w.size(); ++i) {
      auto matrix = w.get<ffi::AnyBuffer>(i);
      auto result = out.get<ffi::Buffer<ffi::F32>>(i);
      if (!matrix.has_value() || !result.has_value()) return ffi::Error::InvalidArgument("layer_matmul: a result for every matrix");
      int64_t L = matrix->dimensions()[0], F = matrix->dimensions()[transposed ? 1 : 2];
      const B* first = static_cast<const B*>(matrix->untyped_data());
      of.all.push_back({first + std::clamp<int64_t>(layer.typed_data()[0], 0, L - 1) * of.D * F, F, (*result)->typed_data()});
    }
    if (!transposed)
      multiply_all(pool, of);
    else if constexpr (sizeof(B) > 1)  // tables are not quantised, and eight more sizes of each are seconds of compiling
      multiply_all_transposed(pool, of);
    else
      return ffi::Error::InvalidArgument("layer_matmul: tables of 8 bits have no kernel");
    return ffi::Error::Success();
  };
  auto first = w.get<ffi::AnyBuffer>(0);
  if (!first.has_value()) return ffi::Error::InvalidArgument("layer_matmul: no matrix");
  switch (first->element_type()) {
    case ffi::F32: return run(float{});
    case ffi::BF16: return run(BF16{});
    case ffi::S8: return run(int8_t{});
    case ffi::F8E4M3FN: return run(F8{});
    default: return ffi::Error::InvalidArgument("layer_matmul: weights of this type have no kernel");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_layer_matmul, LayerMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("transposed"));
