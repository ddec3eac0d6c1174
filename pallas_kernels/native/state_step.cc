// A token of heads whose memory is a state S [K, V], see pallas_kernels/state_step: S is read from its row's slot of the pool, and written
// to another or the same, by parts of columns that a core's cache holds between the two passes over them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kVectors = 4;  // of columns at a time: 32 KiB of a state with 128 keys

struct Token {
  const float *q, *k, *decay, *v;  // of one head; decay for every key
  float beta;
  int64_t K, V;
  bool corrects;
};

// Columns from `first` on; `from` is null for an empty state, `to` for one that is not kept.
template <int W>
void columns(const Token& t, const float* from, float* to, float* out, int64_t first) {
  Vec value[W], o[W] = {}, read[W] = {};
  if (from && t.corrects)
    for (int64_t k = 0; k < t.K; ++k) {
      Vec key = spread(t.k[k] * t.decay[k]);
      for (int w = 0; w < W; ++w) read[w] = multiply_add(load(from + k * t.V + first + w * kLanes), key, read[w]);
    }
  for (int w = 0; w < W; ++w) value[w] = (load(t.v + first + w * kLanes) - read[w]) * t.beta;
  for (int64_t k = 0; k < t.K; ++k) {
    Vec key = spread(t.k[k]), query = spread(t.q[k]), decay = spread(t.decay[k]);
    for (int w = 0; w < W; ++w) {
      int64_t at = k * t.V + first + w * kLanes;
      Vec state = multiply_add(key, value[w], from ? load(from + at) * decay : Vec{});
      if (to) store(to + at, state);
      o[w] = multiply_add(query, state, o[w]);
    }
  }
  for (int w = 0; w < W; ++w) store(out + first + w * kLanes, o[w]);
}

ffi::Error StateStep(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                     ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::F32> pool, ffi::Buffer<ffi::S32> layer,
                     ffi::Buffer<ffi::S32> load_from, ffi::Buffer<ffi::S32> save_to, bool corrects, ffi::ResultBuffer<ffi::F32> out,
                     ffi::ResultBuffer<ffi::F32> states) {
  auto of = pool.dimensions();
  int64_t B = q.dimensions()[0], S = of[1], N = of[2], K = of[3], V = of[4], J = decay.dimensions()[2], size = N * K * V;
  float* all = states->typed_data();
  if (all != pool.typed_data()) std::memcpy(all, pool.typed_data(), pool.size_bytes());  // XLA gave the result another place
  all += std::clamp<int64_t>(layer.typed_data()[0], 0, of[0] - 1) * S * size;
  over_tasks(threads, B * N, B * size > (1 << 15), [&](int64_t i) {
    int64_t b = i / N, n = i % N, from = load_from.typed_data()[b], to = save_to.typed_data()[b];
    thread_local std::vector<float> by;
    by.resize(K);
    for (int64_t j = 0; j < K; ++j) by[j] = std::exp(decay.typed_data()[i * J + (J == 1 ? 0 : j)]);
    auto at = [&](int64_t slot) { return slot < 0 || slot >= S ? nullptr : all + slot * size + n * K * V; };
    Token t{q.typed_data() + i * K, k.typed_data() + i * K, by.data(), v.typed_data() + i * V, beta.typed_data()[i], K, V, corrects};
    float* o = out->typed_data() + i * V;
    int64_t first = 0;
    for (; first + kVectors * kLanes <= V; first += kVectors * kLanes) columns<kVectors>(t, at(from), at(to), o, first);
    for (; first < V; first += kLanes) columns<1>(t, at(from), at(to), o, first);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_state_step, StateStep,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<bool>("corrects")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
