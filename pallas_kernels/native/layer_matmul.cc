// x [M, D] times one layer of w [L, D, F]: read from where it lies, once, by panels of columns.

#include <algorithm>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kRows = 6, kVectors = 4;  // 24 sums in registers
constexpr int kPanel = kVectors * kLanes;

// out[r][...] = a b for R rows and one panel, or the first `columns` of one.
template <int R, typename B>
void block(const float* a, int64_t stride_a, const B* b, int64_t stride_b, int64_t K, float* out, int64_t stride_out, int64_t columns,
           int64_t ahead) {
  if (columns == kPanel) {
    Vec acc[R][kVectors] = {};
    multiply<R, kVectors>(acc, a, stride_a, b, stride_b, K, ahead);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) store(out + r * stride_out + v * kLanes, acc[r][v]);
    return;
  }
  int64_t f = 0;
  for (; f + kLanes <= columns; f += kLanes) {
    Vec acc[R][1] = {};
    multiply<R, 1>(acc, a, stride_a, b + f, stride_b, K, 0);
    for (int r = 0; r < R; ++r) store(out + r * stride_out + f, acc[r][0]);
  }
  for (; f < columns; ++f)
    for (int r = 0; r < R; ++r) {
      float sum = 0;
      for (int64_t k = 0; k < K; ++k) sum = std::fma(a[r * stride_a + k], one(b + k * stride_b + f), sum);
      out[r * stride_out + f] = sum;
    }
}

template <typename B>
void rows(int64_t count, const float* a, int64_t stride_a, const B* b, int64_t stride_b, int64_t K, float* out, int64_t stride_out,
          int64_t columns, int64_t ahead) {
  switch (count) {
    case 1: return block<1>(a, stride_a, b, stride_b, K, out, stride_out, columns, ahead);
    case 2: return block<2>(a, stride_a, b, stride_b, K, out, stride_out, columns, ahead);
    case 3: return block<3>(a, stride_a, b, stride_b, K, out, stride_out, columns, ahead);
    case 4: return block<4>(a, stride_a, b, stride_b, K, out, stride_out, columns, ahead);
    case 5: return block<5>(a, stride_a, b, stride_b, K, out, stride_out, columns, ahead);
    default: return block<6>(a, stride_a, b, stride_b, K, out, stride_out, columns, ahead);
  }
}

template <typename B>
void matmul(ffi::ThreadPool& pool, const float* x, const B* w, float* out, int64_t M, int64_t D, int64_t F) {
  int64_t panels = (F + kPanel - 1) / kPanel, blocks = (M + kRows - 1) / kRows;
  over_tasks(pool, panels, M * D * F > (1 << 16), [&](int64_t p) {
    int64_t first = p * kPanel, columns = std::min<int64_t>(kPanel, F - first);
    const B* panel = w + first;
    auto all = [&](const auto* b, int64_t stride, int64_t begin, int64_t ahead) {
      for (int64_t i = begin; i < blocks; ++i) {
        // Blocks as equal as they can be: eight rows are 4 and 4.
        int64_t at = M * i / blocks, count = M * (i + 1) / blocks - at;
        rows(count, x + at * D, D, b, stride, D, out + at * F + first, F, columns, ahead);
      }
    };
    if (blocks <= (sizeof(B) == 1 ? 1 : 2) || columns < kPanel) return all(panel, F, 0, 16);
    // Many rows read a panel again and again: side by side it is no work for the TLB, and converted once.
    thread_local std::vector<float> copy;
    copy.resize(D * kPanel);
    for (int64_t k = 0; k < D; ++k) {
      const B* row = panel + k * F;
      const char* next = reinterpret_cast<const char*>(row + 16 * F);
      for (int at = 0; at < int(kPanel * sizeof(B)); at += 64) __builtin_prefetch(next + at, 0, 2);
      for (int v = 0; v < kVectors; ++v) store(copy.data() + k * kPanel + v * kLanes, load(row + v * kLanes));
    }
    all(copy.data(), kPanel, 0, 0);
  });
}

ffi::Error LayerMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                       ffi::ResultBuffer<ffi::F32> out) {
  int64_t M = x.dimensions()[0], D = x.dimensions()[1], L = w.dimensions()[0], F = w.dimensions()[2];
  int64_t at = std::clamp<int64_t>(layer.typed_data()[0], 0, L - 1) * D * F;
  float* y = out->typed_data();
  switch (w.element_type()) {
    case ffi::F32: matmul(pool, x.typed_data(), reinterpret_cast<const float*>(w.untyped_data()) + at, y, M, D, F); break;
    case ffi::BF16: matmul(pool, x.typed_data(), reinterpret_cast<const BF16*>(w.untyped_data()) + at, y, M, D, F); break;
    case ffi::S8: matmul(pool, x.typed_data(), reinterpret_cast<const int8_t*>(w.untyped_data()) + at, y, M, D, F); break;
    case ffi::F8E4M3FN: matmul(pool, x.typed_data(), reinterpret_cast<const F8*>(w.untyped_data()) + at, y, M, D, F); break;
    default: return ffi::Error::InvalidArgument("layer_matmul: weights of this type have no kernel");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mint_layer_matmul, LayerMatmul,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<
        ffi::Buffer<ffi::F32>>());
