// Vectors of the widest kind that the machine has, as GCC and Clang know them, and the small dense product that all kernels here are
// made of. Which other rows a product has never changes a row's sum: every element is one chain of multiply-adds, in order.

#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) || defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Vector registers. A product keeps its sums in them: with more sums than registers every multiply-add loads and stores one, and
// decoding SmolLM2 in blocks of 4 bits took three times as long for AVX2.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// Vectors of columns, at most 4, whose sums for R rows fit in registers beside one vector of each column and one number of a row.
constexpr int columns_beside(int R) {
  int fit = (kRegisters - 1) / (R + 1);
  return fit < 1 ? 1 : fit > 4 ? 4 : fit;
}

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vec spread(float x) { return x - Vec{}; }

// Keeps the compiler from reading a vector again for each product that it is in.
inline Vec in_register(Vec x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// x w + acc with one rounding where the machine has that. Left to the compiler, whether a sum is fused depends on the loop that it is in:
// for AVX2 GCC 12 multiplied one row's last columns apart, and their bits depended on how many rows there were. So that is off.
inline Vec multiply_add(Vec x, Vec w, Vec acc) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)acc);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)acc);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)acc, (float32x4_t)x, (float32x4_t)w);
#else
  return acc + x * w;
#endif
}

// Weights as they are stored.
struct BF16 {
  uint16_t bits;
};
struct F8 {  // e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones are NaN
  uint8_t bits;
};

struct F16 {
  uint16_t bits;
};

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

inline Vec load(const BF16* p) {
  typedef uint16_t Half __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  UVec wide = __builtin_convertvector(*reinterpret_cast<const Half*>(p), UVec) << 16;
  return (Vec)wide;
}

inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 converts by halves otherwise, at half the speed, and for AVX2 lane by lane, at a fifth
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t Byte __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Byte*>(p), IVec), Vec);
#endif
}

inline UVec load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (UVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (UVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  typedef uint8_t Byte __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Byte*>(p), UVec);
#endif
}

inline Vec load(const F8* p) {
  UVec x = load_bytes(reinterpret_cast<const uint8_t*>(p));
  UVec magnitude = x & 0x7f;
  // Exponent and mantissa moved into a float's places, the bias put right. Numbers without an exponent are converted: in a float's places
  // they would be subnormal, and XLA's threads take these for 0.
  Vec small = __builtin_convertvector((IVec)magnitude, Vec) * 0x1p-9f;
  UVec less = (UVec)(magnitude < 8), wide = (magnitude << 20) + (120u << 23);
  Vec value = (Vec)(((UVec)small & less) | (wide & ~less));
  UVec nan = (UVec)(magnitude == 0x7f) & 0x7fc00000u;
  return (Vec)(((UVec)value | nan) | ((x & 0x80) << 24));
}

// Numbers without an exponent by conversion, see above; a processor's own instruction knows them whatever XLA's threads do.
inline Vec load(const F16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef uint16_t Half __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  UVec x = __builtin_convertvector(*reinterpret_cast<const Half*>(p), UVec);
  UVec magnitude = x & 0x7fff;
  Vec small = __builtin_convertvector((IVec)magnitude, Vec) * 0x1p-24f;
  UVec less = (UVec)(magnitude < 1024), wide = (magnitude << 13) + (112u << 23);
  UVec huge = (UVec)(magnitude >= 0x7c00) & (112u << 23);  // inf and NaN have the largest exponent
  return (Vec)(((((UVec)small & less) | ((wide + huge) & ~less))) | ((x & 0x8000) << 16));
#endif
}

inline float one(const float* p) { return *p; }
inline float one(const BF16* p) {
  uint32_t wide = uint32_t(p->bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline float one(const int8_t* p) { return float(*p); }
inline float one(const F8* p) {
  uint32_t magnitude = p->bits & 0x7fu, sign = (p->bits & 0x80u) << 24, bits = (magnitude << 20) + (120u << 23);
  float out = float(magnitude) * 0x1p-9f;
  if (magnitude < 8) std::memcpy(&bits, &out, 4);
  bits |= sign | (magnitude == 0x7f ? 0x7fc00000u : 0u);
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

// exp(x) for x <= 0, and NaN for NaN: Cephes' polynomial after reduction by multiples of ln 2. Below -87.3 it is 0.
inline Vec exp_of(Vec x) {
  Vec low = spread(-87.3f);
  IVec under = x < low;
  Vec clipped = (Vec)(((IVec)low & under) | ((IVec)x & ~under));
  Vec turns = multiply_add(clipped, spread(1.44269504088896341f), spread(12582912.0f));  // rounds to an integer in the low bits
  IVec exponent = (IVec)turns - 0x4b400000;
  Vec n = turns - 12582912.0f;
  Vec r = multiply_add(n, spread(-0.693359375f), clipped);
  r = multiply_add(n, spread(2.12194440e-4f), r);
  Vec p = spread(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = multiply_add(p, r, spread(c));
  p = multiply_add(p * r, r, r) + 1.0f;
  Vec out = (Vec)((IVec)p + (exponent << 23));
  IVec nan = x != x;
  out = (Vec)(((IVec)out & ~under) | ((IVec)x & nan));
  return out;
}

// acc[r][v] += sum over k of a[r * stride_a + k] b[k * stride_b + v lanes], for R rows and V vectors of columns. What is `ahead` rows
// further on is fetched; 0: nothing.
template <int R, int V, typename B>
inline void multiply_at_once(Vec (&acc)[R][V], const float* a, int64_t stride_a, const B* b, int64_t stride_b, int64_t K, int64_t ahead) {
  for (int64_t k = 0; k < K; ++k) {
    const B* row = b + k * stride_b;
    if (ahead) {
      const char* next = reinterpret_cast<const char*>(row + ahead * stride_b);
      for (int at = 0; at < int(V * kLanes * sizeof(B)); at += 64) __builtin_prefetch(next + at, 0, 2);
    }
    Vec w[V];
    for (int v = 0; v < V; ++v) w[v] = load(row + v * kLanes);
    for (int r = 0; r < R; ++r) {
      Vec x = spread(a[r * stride_a + k]);
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(x, w[v], acc[r][v]);
    }
  }
}

// The same of what is in a cache: as many columns at a time as there are registers for.
template <int R, int V, typename B>
inline void multiply(Vec (&acc)[R][V], const float* a, int64_t stride_a, const B* b, int64_t stride_b, int64_t K) {
  constexpr int fit = columns_beside(R), W = V % fit == 0 ? fit : fit > 2 && V % 2 == 0 ? 2 : 1;
  if constexpr (V <= fit) {
    multiply_at_once(acc, a, stride_a, b, stride_b, K, 0);
  } else {
    for (int first = 0; first < V; first += W) {
      Vec some[R][W];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < W; ++v) some[r][v] = acc[r][first + v];
      multiply_at_once(some, a, stride_a, b + first * kLanes, stride_b, K, 0);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < W; ++v) acc[r][first + v] = some[r][v];
    }
  }
}

// The sum of a vector's lanes: halves onto halves, so that it does not depend on what is beside it.
inline float total(Vec x) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1)));
#else
  __m256 eight = (__m256)x;
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#endif
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// A square of lanes x lanes numbers.
#if defined(__AVX__)
// Rows 4g to 4g + 3 in a part of 128 bits for each four columns: part l of square[4g + j] is column 4l + j.
inline void transpose_parts(const float* in, int64_t stride, Vec (&square)[kLanes]) {
#if defined(__AVX512F__)
#define EACH(op) _mm512_##op
  typedef __m512 Row;
  typedef __m512d Pair;
#else
#define EACH(op) _mm256_##op
  typedef __m256 Row;
  typedef __m256d Pair;
#endif
  for (int g = 0; g < kLanes; g += 4) {
    Row r0 = (Row)load(in + g * stride), r1 = (Row)load(in + (g + 1) * stride);
    Row r2 = (Row)load(in + (g + 2) * stride), r3 = (Row)load(in + (g + 3) * stride);
    Pair low = (Pair)EACH(unpacklo_ps)(r0, r1), high = (Pair)EACH(unpackhi_ps)(r0, r1);
    Pair low2 = (Pair)EACH(unpacklo_ps)(r2, r3), high2 = (Pair)EACH(unpackhi_ps)(r2, r3);
    square[g] = (Vec)EACH(unpacklo_pd)(low, low2), square[g + 1] = (Vec)EACH(unpackhi_pd)(low, low2);
    square[g + 2] = (Vec)EACH(unpacklo_pd)(high, high2), square[g + 3] = (Vec)EACH(unpackhi_pd)(high, high2);
  }
#undef EACH
}

inline void transpose(const float* in, int64_t stride_in, float* out, int64_t stride_out) {
  Vec x[kLanes];
  transpose_parts(in, stride_in, x);
  for (int j = 0; j < 4; ++j) {
#if defined(__AVX512F__)
    __m512 even = _mm512_shuffle_f32x4((__m512)x[j], (__m512)x[j + 4], 0x88);
    __m512 odd = _mm512_shuffle_f32x4((__m512)x[j], (__m512)x[j + 4], 0xdd);
    __m512 even2 = _mm512_shuffle_f32x4((__m512)x[j + 8], (__m512)x[j + 12], 0x88);
    __m512 odd2 = _mm512_shuffle_f32x4((__m512)x[j + 8], (__m512)x[j + 12], 0xdd);
    store(out + j * stride_out, (Vec)_mm512_shuffle_f32x4(even, even2, 0x88));
    store(out + (j + 4) * stride_out, (Vec)_mm512_shuffle_f32x4(odd, odd2, 0x88));
    store(out + (j + 8) * stride_out, (Vec)_mm512_shuffle_f32x4(even, even2, 0xdd));
    store(out + (j + 12) * stride_out, (Vec)_mm512_shuffle_f32x4(odd, odd2, 0xdd));
#else
    store(out + j * stride_out, (Vec)_mm256_permute2f128_ps((__m256)x[j], (__m256)x[j + 4], 0x20));
    store(out + (j + 4) * stride_out, (Vec)_mm256_permute2f128_ps((__m256)x[j], (__m256)x[j + 4], 0x31));
#endif
  }
}
#else
#if defined(__clang__)
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, ...) __builtin_shuffle(x, y, (IVec){__VA_ARGS__})
#endif
inline void transpose(const float* in, int64_t stride_in, float* out, int64_t stride_out) {
  Vec a = load(in), b = load(in + stride_in), c = load(in + 2 * stride_in), d = load(in + 3 * stride_in);
  Vec low = PICK(a, b, 0, 4, 1, 5), high = PICK(a, b, 2, 6, 3, 7), low2 = PICK(c, d, 0, 4, 1, 5), high2 = PICK(c, d, 2, 6, 3, 7);
  store(out, PICK(low, low2, 0, 1, 4, 5));
  store(out + stride_out, PICK(low, low2, 2, 3, 6, 7));
  store(out + 2 * stride_out, PICK(high, high2, 0, 1, 4, 5));
  store(out + 3 * stride_out, PICK(high, high2, 2, 3, 6, 7));
}
#undef PICK
#endif
