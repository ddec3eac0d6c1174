// The rows in use of x [M, D], the first ones, times one layer of several matrices in blocks of 4 or 8 bits: unpacked in registers, or
// for more rows in the first cache, so that each is read once in the bytes that its checkpoint has. And a matrix unpacked.
//
// A matrix [D, F] is panels of 64 columns, a panel blocks of 32 rows one after another, so that a thread reads one stream of bytes.
// A weight is q d + m of its column's block, or q d: products are exact in float32, the sum is rounded once, as in a float32 checkpoint.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "products.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kColumns = 64, kDepth = 32;
constexpr int kRows = 6, kVectors = 4;
constexpr int64_t kAhead = 8;  // blocks that are fetched ahead: 10 KB

struct Four {
  F16 d[kColumns], m[kColumns];
  uint8_t q[kDepth / 2][kColumns];  // two rows in a byte, the first in its lower half
};
struct Eight {
  F16 d[kColumns];
  int8_t q[kDepth][kColumns];
};
static_assert(sizeof(Four) == 1280 && sizeof(Eight) == 2176, "blocks lie in memory as they are written");

template <typename Block>
inline void fetch(const Block* b) {
  const char* at = reinterpret_cast<const char*>(b);
  for (size_t i = 0; i < sizeof(Block); i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Of one vector of a block's columns, scale and minimum; and the weights of rows 2j and 2j + 1.
struct FourScale {
  Vec d, m;
};
inline FourScale scale_of(const Four& b, int64_t column) { return {load(b.d + column), load(b.m + column)}; }
inline void two(const Four& b, int64_t j, int64_t column, const FourScale& by, Vec& first, Vec& second) {
#if defined(__AVX512F__)
  // The four bits of a lane name one of sixteen numbers: no mask and no conversion.
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i both = (__m512i)load_bytes(b.q[j] + column);
  first = multiply_add((Vec)_mm512_permutexvar_ps(both, numbers), by.d, by.m);
  second = multiply_add((Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers), by.d, by.m);
#else
  IVec both = (IVec)load_bytes(b.q[j] + column);
  first = multiply_add(__builtin_convertvector(both & 15, Vec), by.d, by.m);
  second = multiply_add(__builtin_convertvector(both >> 4, Vec), by.d, by.m);
#endif
}

inline Vec scale_of(const Eight& b, int64_t column) { return load(b.d + column); }
inline void two(const Eight& b, int64_t j, int64_t column, const Vec& by, Vec& first, Vec& second) {
  first = load(b.q[2 * j] + column) * by;
  second = load(b.q[2 * j + 1] + column) * by;
}

template <typename Block>
using Scale = decltype(scale_of(std::declval<const Block&>(), 0));

// out[k][...] for V vectors of columns of a block.
template <int V, typename Block>
inline void unpack(const Block& b, int64_t column, float* out, int64_t stride) {
  Scale<Block> by[V];
  for (int v = 0; v < V; ++v) by[v] = scale_of(b, column + v * kLanes);
  for (int64_t j = 0; j < kDepth / 2; ++j)
    for (int v = 0; v < V; ++v) {
      Vec first, second;
      two(b, j, column + v * kLanes, by[v], first, second);
      store(out + 2 * j * stride + v * kLanes, first);
      store(out + (2 * j + 1) * stride + v * kLanes, second);
    }
}

// acc[r][v] += a b for R rows: unpacked in registers.
template <int R, int V, typename Block>
inline void multiply_block(Vec (&acc)[R][V], const float* a, int64_t stride, const Block& b, int64_t column) {
  Scale<Block> by[V];
  for (int v = 0; v < V; ++v) by[v] = scale_of(b, column + v * kLanes);
  for (int64_t j = 0; j < kDepth / 2; ++j) {
    Vec first[V], second[V];
    for (int v = 0; v < V; ++v) two(b, j, column + v * kLanes, by[v], first[v], second[v]);
    for (int r = 0; r < R; ++r) {
      Vec x = spread(a[r * stride + 2 * j]), y = spread(a[r * stride + 2 * j + 1]);
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(y, second[v], multiply_add(x, first[v], acc[r][v]));
    }
  }
}

// Calls work(one, panel's blocks, its first column) for all panels.
template <typename Block, typename Work>
void by_panels(ffi::ThreadPool& pool, const Products<Block>& of, const Work& work) {
  of.by_parts(pool, kColumns, [&](const auto& one, int64_t p) { work(one, one.w + p * (of.D / kDepth), p * kColumns); });
}

template <int R, typename Block>
void few(ffi::ThreadPool& pool, const Products<Block>& of) {
  constexpr int fit = columns_beside(R <= 2 ? 2 * R + 2 : R);  // unpacked in registers, two rows of weights and their scales are there too
  constexpr int V = fit == 3 ? 2 : fit;  // a divisor of a block's columns
  by_panels(pool, of, [&](const auto& one, const Block* b, int64_t first) {
    for (int64_t column = 0; column < kColumns; column += V * kLanes) {
      Vec acc[R][V] = {};
      for (int64_t n = 0; n < of.D / kDepth; ++n) {
        if (!column) fetch(b + n + kAhead);
        const float* a = of.x + n * kDepth;
        if constexpr (R <= 2) {
          multiply_block<R, V>(acc, a, of.D, b[n], column);
        } else {
          alignas(64) float w[kDepth * V * kLanes];
          unpack<V>(b[n], column, w, V * kLanes);
          multiply(acc, a, of.D, w, V * kLanes, kDepth);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(one.out + r * one.F + first + column + v * kLanes, acc[r][v]);
    }
  });
}

template <int R>
void rows_of(const float* a, int64_t D, const float* w, float* out, int64_t F) {
  for (int64_t column = 0; column < kColumns; column += kVectors * kLanes) {
    Vec acc[R][kVectors] = {};
    multiply(acc, a, D, w + column, kColumns, D);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) store(out + r * F + column + v * kLanes, acc[r][v]);
  }
}

template <typename Block>
void many(ffi::ThreadPool& pool, const Products<Block>& of) {
  int64_t D = of.D, blocks = (of.M + kRows - 1) / kRows;
  by_panels(pool, of, [&](const auto& one, const Block* b, int64_t first) {
    thread_local std::vector<float> copy;
    copy.resize(D * kColumns);
    for (int64_t n = 0; n < D / kDepth; ++n) {
      fetch(b + n + kAhead);
      for (int64_t column = 0; column < kColumns; column += kVectors * kLanes)
        unpack<kVectors>(b[n], column, copy.data() + n * kDepth * kColumns + column, kColumns);
    }
    for (int64_t i = 0; i < blocks; ++i) {
      int64_t at = of.M * i / blocks;
      const float* a = of.x + at * D;
      float* y = one.out + at * one.F + first;
      switch (of.M * (i + 1) / blocks - at) {
        case 4: rows_of<4>(a, D, copy.data(), y, one.F); break;
        case 5: rows_of<5>(a, D, copy.data(), y, one.F); break;
        default: rows_of<6>(a, D, copy.data(), y, one.F);
      }
    }
  });
}

template <typename Block>
void multiply_all(ffi::ThreadPool& pool, const Products<Block>& of) {
  switch (of.M) {
    case 0: return by_panels(pool, of, [](const auto&, const Block*, int64_t) {});
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

// Calls run(Block()) with the kind that blocks of so many bytes are of.
template <typename Run>
ffi::Error by_kind(int64_t bytes, const Run& run) {
  if (bytes == sizeof(Four)) return run(Four{});
  if (bytes == sizeof(Eight)) return run(Eight{});
  return ffi::Error::InvalidArgument("blocks of this many bytes have no kernel");
}

ffi::Error BlockMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> rows,
                       ffi::RemainingArgs w, ffi::RemainingRets out) {
  auto first = w.get<ffi::Buffer<ffi::U8>>(0);
  if (!first.has_value()) return ffi::Error::InvalidArgument("block_matmul: no matrix");
  return by_kind(first->dimensions()[3], [&](auto kind) -> ffi::Error {
    using Block = decltype(kind);
    int64_t room = x.dimensions()[0], M = std::clamp<int64_t>(rows.typed_data()[0], 0, room);
    Products<Block> of{{}, x.typed_data(), M, x.dimensions()[1], room};
    for (size_t i = 0; i < w.size(); ++i) {
      auto matrix = w.get<ffi::Buffer<ffi::U8>>(i);
      auto result = out.get<ffi::Buffer<ffi::F32>>(i);
      if (!matrix.has_value() || !result.has_value() || matrix->dimensions()[3] != sizeof(Block))
        return ffi::Error::InvalidArgument("block_matmul: a result for every matrix, all of one kind");
      int64_t L = matrix->dimensions()[0], panels = matrix->dimensions()[1], depth = matrix->dimensions()[2];
      int64_t number = std::clamp<int64_t>(layer.typed_data()[0], 0, L - 1);
      const Block* blocks = reinterpret_cast<const Block*>(matrix->typed_data()) + number * panels * depth;
      of.all.push_back({blocks, panels * kColumns, (*result)->typed_data()});
    }
    multiply_all(pool, of);
    return ffi::Error::Success();
  });
}

// [D, F], or [F, D] if transposed.
ffi::Error BlockUnpack(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> w, ffi::ResultBuffer<ffi::F32> out, bool transposed) {
  int64_t panels = w.dimensions()[0], depth = w.dimensions()[1], F = panels * kColumns, D = depth * kDepth;
  return by_kind(w.dimensions()[2], [&](auto kind) -> ffi::Error {
    using Block = decltype(kind);
    over_tasks(pool, panels, panels * depth > 16, [&](int64_t p) {
      const Block* b = reinterpret_cast<const Block*>(w.typed_data()) + p * depth;
      alignas(64) float block[kDepth * kColumns];
      for (int64_t n = 0; n < depth; ++n) {
        float* to = transposed ? block : out->typed_data() + n * kDepth * F + p * kColumns;
        for (int64_t column = 0; column < kColumns; column += kVectors * kLanes)
          unpack<kVectors>(b[n], column, to + column, transposed ? kColumns : F);
        if (!transposed) continue;
        for (int64_t c = 0; c < kColumns; c += kLanes)
          for (int64_t k = 0; k < kDepth; k += kLanes)
            transpose(block + k * kColumns + c, kColumns, out->typed_data() + (p * kColumns + c) * D + n * kDepth + k, D);
      }
    });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_block_matmul, BlockMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_block_unpack, BlockUnpack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed"));
