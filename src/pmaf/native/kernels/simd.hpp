// Numbers, and vectors of numbers, under one set of names.
//
// Every algorithm on tridiagonal or tiny matrices is written once, for a type R: with R = double it
// works on one matrix, with R = Lanes on WIDTH matrices at a time, one in each lane, and with R = Twins
// on twice as many.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pmaf {
namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int WIDTH = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 4;
#else
constexpr int WIDTH = 2;
#endif

typedef double Lanes __attribute__((vector_size(8 * WIDTH)));
typedef int64_t LaneMask __attribute__((vector_size(8 * WIDTH)));

constexpr double EPS = 2.220446049250313e-16;

template <class R> struct Kind;
template <> struct Kind<double> {
  using Mask = bool;
  static constexpr int lanes = 1;
};
template <> struct Kind<Lanes> {
  using Mask = LaneMask;
  static constexpr int lanes = WIDTH;
};
template <class R> using MaskOf = typename Kind<R>::Mask;

inline double choose(bool m, double a, double b) { return m ? a : b; }
inline Lanes choose(LaneMask m, Lanes a, Lanes b) {
#if defined(__AVX2__) && !defined(__AVX512DQ__)
  return (Lanes)_mm256_blendv_pd((__m256d)b, (__m256d)a, (__m256d)m);
#elif defined(__SSE2__) && !defined(__AVX2__)
  // Written out, because GCC 12 fails to compile the general form for SSE2.
  return (Lanes)_mm_or_pd(_mm_and_pd((__m128d)m, (__m128d)a), _mm_andnot_pd((__m128d)m, (__m128d)b));
#else
  return (Lanes)((m & (LaneMask)a) | (~m & (LaneMask)b));
#endif
}
inline double root(double x) { return __builtin_sqrt(x); }
inline Lanes root(Lanes x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  return (Lanes)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
  return (Lanes)_mm256_sqrt_pd((__m256d)x);
#else
  Lanes r;
  for (int i = 0; i < WIDTH; ++i) r[i] = __builtin_sqrt(x[i]);
  return r;
#endif
}
inline bool any(bool m) { return m; }
inline bool any(LaneMask m) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  return _mm512_movepi64_mask((__m512i)m) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_pd((__m256d)m) != 0;
#else
  for (int i = 0; i < WIDTH; ++i)
    if (m[i]) return true;
  return false;
#endif
}
inline bool both(bool a, bool b) { return a && b; }
inline LaneMask both(LaneMask a, LaneMask b) { return a & b; }
inline bool either(bool a, bool b) { return a || b; }
inline LaneMask either(LaneMask a, LaneMask b) { return a | b; }
inline bool negate(bool a) { return !a; }
inline LaneMask negate(LaneMask a) { return ~a; }
inline bool differ(bool a, bool b) { return a != b; }
inline LaneMask differ(LaneMask a, LaneMask b) { return a ^ b; }

template <class R> inline R all_of(double x) { return x - R{}; }
constexpr int64_t EXPONENT = 0x7ff0000000000000;
// The power of two in front of |x|: zero for subnormal numbers, infinite for what is not finite.
inline double exponent_of(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  bits &= EXPONENT;
  __builtin_memcpy(&x, &bits, 8);
  return x;
}
inline Lanes exponent_of(Lanes x) { return (Lanes)((LaneMask)x & (EXPONENT - LaneMask{})); }
// Without a comparison, each of these is one instruction.
inline double size_of(double x) { return __builtin_fabs(x); }
inline Lanes size_of(Lanes x) {
  constexpr int64_t magnitude = 0x7fffffffffffffff;
  return (Lanes)((LaneMask)x & (magnitude - LaneMask{}));
}
inline double larger(double a, double b) { return a > b ? a : b; }
inline double smaller(double a, double b) { return a < b ? a : b; }
#if defined(__AVX512F__) && defined(__AVX512DQ__)
inline Lanes larger(Lanes a, Lanes b) { return (Lanes)_mm512_max_pd((__m512d)a, (__m512d)b); }
inline Lanes smaller(Lanes a, Lanes b) { return (Lanes)_mm512_min_pd((__m512d)a, (__m512d)b); }
#elif defined(__AVX2__)
inline Lanes larger(Lanes a, Lanes b) { return (Lanes)_mm256_max_pd((__m256d)a, (__m256d)b); }
inline Lanes smaller(Lanes a, Lanes b) { return (Lanes)_mm256_min_pd((__m256d)a, (__m256d)b); }
#elif defined(__SSE2__)
inline Lanes larger(Lanes a, Lanes b) { return (Lanes)_mm_max_pd((__m128d)a, (__m128d)b); }
inline Lanes smaller(Lanes a, Lanes b) { return (Lanes)_mm_min_pd((__m128d)a, (__m128d)b); }
#else
inline Lanes larger(Lanes a, Lanes b) { return choose(a > b, a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return choose(a < b, a, b); }
#endif
inline double get(double x, int) { return x; }
inline double get(Lanes x, int i) { return x[i]; }
inline void put(double &x, int, double value) { x = value; }
inline void put(Lanes &x, int i, double value) { x[i] = value; }
inline bool is_set(bool m, int) { return m; }
inline bool is_set(LaneMask m, int i) { return m[i] != 0; }

// Two vectors, for 2·WIDTH matrices at a time. Divisions and roots take long, and each step of an
// algorithm on small matrices waits for the one before: meanwhile the processor works on the other
// vector.
struct Twins {
  Lanes a, b;
  Twins &operator+=(Twins y) { return a += y.a, b += y.b, *this; }
  Twins &operator-=(Twins y) { return a -= y.a, b -= y.b, *this; }
  Twins &operator*=(Twins y) { return a *= y.a, b *= y.b, *this; }
  Twins &operator/=(Twins y) { return a /= y.a, b /= y.b, *this; }
};
struct TwinMasks {
  LaneMask a, b;
};
template <> struct Kind<Twins> {
  using Mask = TwinMasks;
  static constexpr int lanes = 2 * WIDTH;
};
inline Twins operator+(Twins x, Twins y) { return {x.a + y.a, x.b + y.b}; }
inline Twins operator-(Twins x, Twins y) { return {x.a - y.a, x.b - y.b}; }
inline Twins operator*(Twins x, Twins y) { return {x.a * y.a, x.b * y.b}; }
inline Twins operator/(Twins x, Twins y) { return {x.a / y.a, x.b / y.b}; }
inline Twins operator-(Twins x) { return {-x.a, -x.b}; }
// Comparisons of vectors of SSE2 are written out for the same reason as `choose`.
#if defined(__SSE2__) && !defined(__AVX2__)
#define PMAF_COMPARE(name, operation) \
  inline LaneMask name(Lanes x, Lanes y) { return (LaneMask)_mm_##operation##_pd((__m128d)x, (__m128d)y); }
PMAF_COMPARE(is_less, cmplt)
PMAF_COMPARE(is_at_most, cmple)
PMAF_COMPARE(is_equal, cmpeq)
#undef PMAF_COMPARE
#else
inline LaneMask is_less(Lanes x, Lanes y) { return x < y; }
inline LaneMask is_at_most(Lanes x, Lanes y) { return x <= y; }
inline LaneMask is_equal(Lanes x, Lanes y) { return x == y; }
#endif
inline bool is_less(double x, double y) { return x < y; }
inline TwinMasks operator<(Twins x, Twins y) { return {is_less(x.a, y.a), is_less(x.b, y.b)}; }
inline TwinMasks operator>(Twins x, Twins y) { return y < x; }
inline TwinMasks is_less(Twins x, Twins y) { return x < y; }
inline TwinMasks operator<=(Twins x, Twins y) {
  return {is_at_most(x.a, y.a), is_at_most(x.b, y.b)};
}
inline TwinMasks operator==(Twins x, Twins y) { return {is_equal(x.a, y.a), is_equal(x.b, y.b)}; }
inline Twins choose(TwinMasks m, Twins x, Twins y) {
  return {choose(m.a, x.a, y.a), choose(m.b, x.b, y.b)};
}
inline Twins root(Twins x) { return {root(x.a), root(x.b)}; }
inline bool any(TwinMasks m) { return any(m.a | m.b); }
inline TwinMasks both(TwinMasks x, TwinMasks y) { return {x.a & y.a, x.b & y.b}; }
inline TwinMasks either(TwinMasks x, TwinMasks y) { return {x.a | y.a, x.b | y.b}; }
inline TwinMasks negate(TwinMasks x) { return {~x.a, ~x.b}; }
inline TwinMasks differ(TwinMasks x, TwinMasks y) { return {x.a ^ y.a, x.b ^ y.b}; }
template <> inline Twins all_of<Twins>(double x) { return {all_of<Lanes>(x), all_of<Lanes>(x)}; }
inline Twins exponent_of(Twins x) { return {exponent_of(x.a), exponent_of(x.b)}; }
inline Twins size_of(Twins x) { return {size_of(x.a), size_of(x.b)}; }
inline Twins larger(Twins x, Twins y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
inline Twins smaller(Twins x, Twins y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }
inline double get(Twins x, int i) { return i < WIDTH ? x.a[i] : x.b[i - WIDTH]; }
inline void put(Twins &x, int i, double value) {
  if (i < WIDTH)
    x.a[i] = value;
  else
    x.b[i - WIDTH] = value;
}
inline bool is_set(TwinMasks m, int i) { return i < WIDTH ? m.a[i] != 0 : m.b[i - WIDTH] != 0; }

inline double total(Lanes x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  const __m256d half = _mm256_add_pd(_mm512_castpd512_pd256((__m512d)x),
                                     _mm512_extractf64x4_pd((__m512d)x, 1));
#elif defined(__AVX2__)
  const __m256d half = (__m256d)x;
#endif
#if defined(__AVX2__)
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));
  return pair[0] + pair[1];
#else
  double sum = 0;
  for (int i = 0; i < WIDTH; ++i) sum += x[i];
  return sum;
#endif
}

// Exchanges the lanes of WIDTH vectors: lane l of vector i becomes lane i of vector l.
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define PMAF_SHUFFLES
#endif
#endif
#ifdef PMAF_SHUFFLES
// Blocks of `size` lanes are exchanged between x[i] and x[i + size].
template <int size, int... l>
inline void exchange(Lanes *x, std::integer_sequence<int, l...>) {
  for (int i = 0; i < WIDTH; ++i) {
    if (i & size) continue;
    const Lanes a = x[i], b = x[i + size];
    x[i] = __builtin_shufflevector(a, b, (l & size ? WIDTH + l - size : l)...);
    x[i + size] = __builtin_shufflevector(a, b, (l & size ? WIDTH + l : l + size)...);
  }
  if constexpr (2 * size < WIDTH) exchange<2 * size>(x, std::integer_sequence<int, l...>{});
}
inline void transpose(Lanes *x) { exchange<1>(x, std::make_integer_sequence<int, WIDTH>{}); }
#else
inline void transpose(Lanes *x) {
  for (int i = 0; i < WIDTH; ++i)
    for (int l = 0; l < i; ++l) {
      const double saved = x[i][l];
      x[i][l] = x[l][i];
      x[l][i] = saved;
    }
}
#endif

// A complex number, or WIDTH of them.
template <class R> struct Complex {
  R re, im;
  Complex &operator+=(Complex y) { return re += y.re, im += y.im, *this; }
  Complex &operator-=(Complex y) { return re -= y.re, im -= y.im, *this; }
  Complex &operator*=(R f) { return re *= f, im *= f, *this; }
};
template <class R> inline Complex<R> operator+(Complex<R> x, Complex<R> y) {
  return {x.re + y.re, x.im + y.im};
}
template <class R> inline Complex<R> operator-(Complex<R> x, Complex<R> y) {
  return {x.re - y.re, x.im - y.im};
}
template <class R> inline Complex<R> operator-(Complex<R> x) { return {-x.re, -x.im}; }
template <class R> inline Complex<R> operator*(Complex<R> x, Complex<R> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
template <class R> inline Complex<R> operator*(Complex<R> x, R f) { return {x.re * f, x.im * f}; }
template <class R> inline Complex<R> operator/(Complex<R> x, R f) { return {x.re / f, x.im / f}; }
template <class R, class Mask> inline Complex<R> choose(Mask m, Complex<R> a, Complex<R> b) {
  return {choose(m, a.re, b.re), choose(m, a.im, b.im)};
}
inline Complex<double> total(Complex<Lanes> x) { return {total(x.re), total(x.im)}; }

// An entry X of a matrix is a real or a complex number, or a vector of them.
template <class X> struct PartsOf {
  using Real = X;
  static constexpr int count = 1;
};
template <class R> struct PartsOf<Complex<R>> {
  using Real = R;
  static constexpr int count = 2;
};
template <class X> using RealOf = typename PartsOf<X>::Real;
template <class X> constexpr int PARTS = PartsOf<X>::count;

template <class R> inline R conjugate(R x) { return x; }
template <class R> inline Complex<R> conjugate(Complex<R> x) { return {x.re, -x.im}; }
template <class R> inline R real_part(R x) { return x; }
template <class R> inline R real_part(Complex<R> x) { return x.re; }
template <class R> inline R imaginary_part(R) { return all_of<R>(0); }
template <class R> inline R imaginary_part(Complex<R> x) { return x.im; }
template <class R> inline R square_of(R x) { return x * x; }
template <class R> inline R square_of(Complex<R> x) { return x.re * x.re + x.im * x.im; }
template <class R> inline R largest_part(R x) { return size_of(x); }
template <class R> inline R largest_part(Complex<R> x) {
  return larger(size_of(x.re), size_of(x.im));
}
template <class R> inline R reciprocal(R x) { return all_of<R>(1) / x; }
template <class R> inline Complex<R> reciprocal(Complex<R> x) {
  return conjugate(x) * (all_of<R>(1) / square_of(x));
}
template <class X> inline X from_real(RealOf<X> x) {
  if constexpr (PARTS<X> == 2)
    return {x, all_of<RealOf<X>>(0)};
  else
    return x;
}

// About the power of two below |x|, so that its reciprocal is in range; one for zero and for what is
// not finite.
template <class R> inline R power_of_two(R x) {
  const R one = all_of<R>(1), none = all_of<R>(0);
  R power = exponent_of(x);
  power = choose(power == all_of<R>(__builtin_inf()), one, power);
  power = larger(power, choose(x == none, one, all_of<R>(0x1p-1022)));
  return smaller(power, all_of<R>(0x1p1022));
}

// A divisor of at least `least`; one that is smaller becomes −least, as in Sturm counts of LAPACK.
template <class R> inline R away_from_zero(R q, R least) {
  return choose(size_of(q) < least, -least, q);
}

}  // namespace
}  // namespace pmaf
