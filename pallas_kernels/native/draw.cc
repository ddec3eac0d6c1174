// The next token of each row of logits, and what log-probabilities need: twice over a row, the second time out of the cache. The noise of
// a token is made where it is used: as arrays, random bits, noise and scores take most of the time of a draw by XLA.

#include <algorithm>
#include <cmath>
#include <limits>

#include "threads.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kChains = 4;  // of additions, which wait for each other in one

inline Vec choose(IVec mask, Vec yes, Vec no) { return (Vec)(((IVec)yes & mask) | ((IVec)no & ~mask)); }
inline IVec choose(IVec mask, IVec yes, IVec no) { return (yes & mask) | (no & ~mask); }

// log(x) for normal x > 0: Cephes' polynomial after taking the exponent off.
inline Vec log_of(Vec x) {
  IVec exponent = (((IVec)x >> 23) & 0xff) - 126;
  Vec m = (Vec)(((IVec)x & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  IVec low = m < spread(0.707106781186547524f);
  m = choose(low, m + m, m) - 1.0f;
  Vec e = __builtin_convertvector(exponent + low, Vec);
  Vec square = m * m;
  Vec p = spread(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                  -2.4999993993e-1f, 3.3333331174e-1f})
    p = multiply_add(p, m, spread(c));
  p = p * m * square;
  p = multiply_add(e, spread(-2.12194440e-4f), p);
  p = multiply_add(square, spread(-0.5f), p);
  return multiply_add(e, spread(0.693359375f), m + p);
}

// -log(1 - u) for u in (0, 1), as exact for small u as u is: the logarithm of the rounded 1 - u, put right by what the rounding left.
inline Vec exponential_of(Vec u) {
  Vec w = 1.0f - u;
  IVec none = w == spread(1.0f);
  Vec d = choose(none, spread(1.0f), 1.0f - w);
  return choose(none, u, log_of(w) * u / (-d));
}

template <int by>
inline UVec turned(UVec x) {
  return (x << by) | (x >> (32 - by));
}

template <int A, int B, int C, int D>
inline void rounds(UVec& x, UVec& y) {
  x += y, y = turned<A>(y) ^ x;
  x += y, y = turned<B>(y) ^ x;
  x += y, y = turned<C>(y) ^ x;
  x += y, y = turned<D>(y) ^ x;
}

// Threefry-2x32 of 20 rounds (Salmon et al. 2011, section 4.4) of the counters (0, token): both halves of what it gives, xored.
inline UVec random_bits(const uint32_t* key, UVec token) {
  const uint32_t k0 = key[0], k1 = key[1], k2 = k0 ^ k1 ^ 0x1bd11bdau;
  UVec x = UVec{} + k0, y = token + k1;
  rounds<13, 15, 26, 6>(x, y);
  x += k1, y += k2 + 1;
  rounds<17, 29, 16, 24>(x, y);
  x += k2, y += k0 + 2;
  rounds<13, 15, 26, 6>(x, y);
  x += k0, y += k1 + 3;
  rounds<17, 29, 16, 24>(x, y);
  x += k1, y += k2 + 4;
  rounds<13, 15, 26, 6>(x, y);
  x += k2, y += k0 + 5;
  return x ^ y;
}

// visit(at, x, chain) of all vectors of a row; behind the last number is -inf.
template <typename Visit>
inline void over_row(const float* z, int64_t V, const Visit& visit) {
  int64_t at = 0;
  for (; at + kChains * kLanes <= V; at += kChains * kLanes)
    for (int s = 0; s < kChains; ++s) visit(at + s * kLanes, load(z + at + s * kLanes), s);
  for (; at < V; at += kLanes) {
    float rest[kLanes];
    std::fill_n(rest, kLanes, -kInfinity);
    std::copy_n(z + at, std::min<int64_t>(kLanes, V - at), rest);
    visit(at, load(rest), 0);
  }
}

inline float whole(const Vec* sums) { return total((sums[0] + sums[1]) + (sums[2] + sums[3])); }

struct Result {
  int32_t token;
  float top, total, warm;
};

Result row(const float* z, int64_t V, float temperature, const uint32_t* key) {
  Vec best[kChains];
  IVec nan[kChains] = {};
  std::fill_n(best, kChains, spread(-kInfinity));
  over_row(z, V, [&](int64_t, Vec x, int s) {
    best[s] = choose(x > best[s], x, best[s]);
    nan[s] |= x != x;
  });
  float top = -kInfinity;
  bool any = false;
  for (int s = 0; s < kChains; ++s)
    for (int lane = 0; lane < kLanes; ++lane) {
      top = std::max(top, best[s][lane]);
      any |= nan[s][lane] != 0;
    }
  if (any) top = std::numeric_limits<float>::quiet_NaN();
  bool hot = temperature > 0, finite = std::isfinite(top);
  if (any || (hot && !finite)) return {0, top, top, top};
  IVec lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  Vec sum[kChains] = {}, warm[kChains] = {}, score[kChains];
  IVec place[kChains];
  std::fill_n(score, kChains, spread(-kInfinity));
  std::fill_n(place, kChains, IVec{} + std::numeric_limits<int32_t>::max());
  auto offer = [&](Vec offered, int64_t at, int s) {
    IVec more = offered > score[s];
    score[s] = choose(more, offered, score[s]);
    place[s] = choose(more, lanes + int32_t(at), place[s]);
  };
  if (!hot) {
    over_row(z, V, [&](int64_t at, Vec x, int s) {
      if (finite) sum[s] += exp_of(x - top);
      offer(x, at, s);
    });
  } else {
    bool one = temperature == 1.0f;
    over_row(z, V, [&](int64_t at, Vec x, int s) {
      Vec e = exp_of(x - top), weight = one ? e : exp_of((x - top) / temperature);
      sum[s] += e;
      warm[s] += weight;
      UVec bits = random_bits(key, (UVec)(lanes + int32_t(at)));
      Vec u = (__builtin_convertvector(bits, Vec) + 0.5f) * 0x1p-32f;
      Vec most = spread(1.0f - 0x1p-24f);
      offer(weight / exponential_of(choose(u < most, u, most)), at, s);
    });
  }
  float most = -kInfinity;
  int32_t token = std::numeric_limits<int32_t>::max();
  for (int s = 0; s < kChains; ++s)
    for (int lane = 0; lane < kLanes; ++lane) {
      if (score[s][lane] > most) most = score[s][lane], token = place[s][lane];
      if (score[s][lane] == most) token = std::min(token, place[s][lane]);
    }
  if (token >= V) token = 0;  // no number is above -inf
  float log_sum = finite ? std::log(whole(sum)) : 0.0f;
  return {token, top, top + log_sum, hot ? std::log(whole(warm)) : log_sum};
}

ffi::Error Draw(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> z, ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::U32> key,
                ffi::Buffer<ffi::S32> rows, ffi::ResultBuffer<ffi::S32> token, ffi::ResultBuffer<ffi::F32> top,
                ffi::ResultBuffer<ffi::F32> total, ffi::ResultBuffer<ffi::F32> warm) {
  int64_t R = z.dimensions()[0], V = z.dimensions()[1], live = std::clamp<int64_t>(rows.typed_data()[0], 0, R);
  auto put = [&](int64_t r, Result x) {
    token->typed_data()[r] = x.token, top->typed_data()[r] = x.top, total->typed_data()[r] = x.total, warm->typed_data()[r] = x.warm;
  };
  for (int64_t r = live; r < R; ++r) put(r, {});
  over_tasks(pool, live, live * V > (1 << 15), [&](int64_t r) {
    put(r, row(z.typed_data() + r * V, V, temperature.typed_data()[r], key.typed_data() + 2 * r));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mint_draw, Draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
