// How matrices are stored: many tiny ones in the lanes of vectors, or one by itself.
#pragma once

#include <type_traits>

#include "medium.hpp"
#include "numbers.hpp"
#include "tiny.hpp"

namespace pmaf {
namespace {

typedef double Unaligned __attribute__((vector_size(8 * WIDTH), aligned(8)));

// xᴴy
template <class X> inline X dot(const X *x, const X *y, int n) {
  X sum = from_real<X>(all_of<RealOf<X>>(0));
  int i = 0;
  if constexpr (std::is_same_v<X, double>) {
    Lanes sums = all_of<Lanes>(0);
    for (; i + WIDTH <= n; i += WIDTH)
      sums += *(const Unaligned *)(x + i) * *(const Unaligned *)(y + i);
    sum = total(sums);
  }
  for (; i < n; ++i) sum += conjugate(x[i]) * y[i];
  return sum;
}
template <class X> inline void add(X *x, X factor, const X *y, int n) {
  int i = 0;
  if constexpr (std::is_same_v<X, double>)
    for (; i + WIDTH <= n; i += WIDTH)
      *(Unaligned *)(x + i) += all_of<Lanes>(factor) * *(const Unaligned *)(y + i);
  for (; i < n; ++i) x[i] += factor * y[i];
}
template <class X> inline void orthogonal_to(X *x, const X *y, int n) {
  add(x, -dot(y, x, n), y, n);
}

// Matrices whose entries X are numbers, one matrix by itself, or vectors, many matrices. All memory
// is in real numbers; a stride counts those of a row.
template <int N, class X> struct Tiny {
  using Number = RealOf<X>;
  using R = Number;
  using Entry = X;
  static constexpr bool along_rows = false;
  static constexpr int parts = PARTS<X>;
  static int stride_of(int n) { return n * parts; }
  static int place(int i, int part) { return i * parts + part; }
  static X entry(const R *x, int i) { return ((const X *)x)[i]; }

  static void reduce(R *a, int n, int, R *d, R *e, R *tau, R *work) {
    pmaf::reduce<N, X>((X *)a, n, d, e, (X *)tau, (X *)work);
  }
  static void turn_back(const R *a, int n, int, const R *tau, R *z) {
    pmaf::turn_back<N, X>((const X *)a, n, (const X *)tau, (X *)z);
  }
  static void turn(const R *a, int n, int, const R *tau, R *z) {
    pmaf::turn<N, X>((const X *)a, n, (const X *)tau, (X *)z);
  }
  static void product(const R *matrix, int size, int, const R *x, R *image) {
    const int n = N ? N : size;
    const X *a = (const X *)matrix;
    for (int i = 0; i < n; ++i) {
      X sum = from_real<X>(all_of<R>(0));
      for (int j = 0; j < n; ++j) sum += a[i * n + j] * ((const X *)x)[j];
      ((X *)image)[i] = sum;
    }
  }
  static MaskOf<R> factor(R *a, int n, int, R *inverse, R least) {
    const MaskOf<R> good = pmaf::factor<N, X>((X *)a, n, least);
    for (int i = 0; i < n; ++i) inverse[i] = real_part(((const X *)a)[i * n + i]);
    return good;
  }
  static void solve(const R *a, int n, int, const R *, R *x) {
    pmaf::solve<N, X>((const X *)a, n, (X *)x);
  }
  static void solve_lower(const R *a, int n, int, R *x) {
    pmaf::solve_lower<N, X>((const X *)a, n, (X *)x);
  }
  static void solve_upper(const R *a, int n, int, R *x) {
    pmaf::solve_upper<N, X>((const X *)a, n, (X *)x);
  }
  static void congruent(const R *factor, int n, int, const R *, R *a, R *, R *scales) {
    pmaf::congruent<N, X>((const X *)factor, n, (X *)a, scales);
  }
  // Where entry (r, c) of the lower factor is, for r > c.
  static int place_in_factor(int n, int, int r, int c, int part) {
    return place(r * n + c, part);
  }

  static X dot(const R *x, const R *y, int n) {
    return pmaf::dot((const X *)x, (const X *)y, N ? N : n);
  }
  static void add(R *x, X factor, const R *y, int n) {
    pmaf::add((X *)x, factor, (const X *)y, N ? N : n);
  }
  // Row r of A ← A + factor·yyᴴ, in the triangle that is factored.
  static void add_square(R *row, X factor, const R *y, int r, int) {
    for (int i = 0; i <= r; ++i) ((X *)row)[i] += factor * conjugate(((const X *)y)[i]);
  }
};

// Matrices one by itself, with vectors along their rows.
template <class E> struct Rows {
  using Number = double;
  using Entry = E;
  static constexpr bool along_rows = true;
  static constexpr int parts = PARTS<E>;
  static int stride_of(int n) { return (n + WIDTH - 1) / WIDTH * WIDTH * parts; }
  static int place(int i, int part) { return place_of<E>(i, part); }
  static E entry(const double *x, int i) { return pmaf::entry<E>(x, i); }

  static void reduce(double *a, int n, int stride, double *d, double *e, double *tau,
                     double *work) {
    reduce_rows<E>(a, n, stride, d, e, (E *)tau, work);
  }
  static void turn_back(const double *a, int n, int stride, const double *tau, double *z) {
    turn_rows_back<E>(a, n, stride, (const E *)tau, z);
  }
  static void turn(const double *a, int n, int stride, const double *tau, double *z) {
    turn_rows<E>(a, n, stride, (const E *)tau, z);
  }
  // `image` holds 2·stride numbers.
  static void product(const double *a, int n, int stride, const double *x, double *image) {
    double *rows = const_cast<double *>(a);  // which are not changed
    pass_all<E, false>(rows, n, stride, 0, nullptr, nullptr, x, image, image + stride);
  }
  static bool factor(double *a, int n, int stride, double *inverse, double least) {
    return factor_rows<E>(a, n, stride, inverse, least);
  }
  static void solve(const double *a, int n, int stride, const double *inverse, double *x) {
    solve_rows<E>(a, n, stride, inverse, x);
  }
  static void solve_lower(const double *a, int n, int stride, double *x) {
    solve_rows_lower<E>(a, n, stride, x);
  }
  static void solve_upper(const double *a, int n, int stride, double *x) {
    solve_rows_upper<E>(a, n, stride, x);
  }
  static void congruent(const double *factor, int n, int stride, const double *inverse, double *a,
                        double *spare, double *scales) {
    congruent_rows<E>(factor, n, stride, inverse, a, spare, scales);
  }
  static int place_in_factor(int, int stride, int r, int c, int part) {
    return c * stride + place(r, part);
  }

  // Vectors end in zeros.
  static E dot(const double *x, const double *y, int n) {
    return dot_from<E>(x, y, 0, stride_of(n));
  }
  static void add(double *x, E factor, const double *y, int n) {
    add_from<E>(x, factor, y, 0, stride_of(n));
  }
  static void add_square(double *row, E factor, const double *y, int r, int n) {
    const Vector<E> f = spread(factor);
    for (int c = vectors_before(r); c < vectors_in<E>(stride_of(n)); ++c)
      at<E>(row)[c] += f * conjugate(at<E>(y)[c]);
  }
};
using Medium = Rows<double>;

typedef float Halves __attribute__((vector_size(4 * WIDTH), aligned(4)));

// WIDTH numbers next to each other.
template <class F> struct Vectorised { using Type = Unaligned; };
template <> struct Vectorised<float> { using Type = Halves; };

// WIDTH numbers from x on, in double precision, and back. GCC 12 converts vectors of AVX by halves.
template <class F> inline Lanes load_vector(const F *x) {
#if defined(__AVX2__) && !defined(__AVX512DQ__)
  if constexpr (sizeof(F) == 4) return (Lanes)_mm256_cvtps_pd((__m128) * (const Halves *)x);
#endif
  return __builtin_convertvector(*(const typename Vectorised<F>::Type *)x, Lanes);
}
template <class F> inline void store_vector(Lanes x, F *to) {
#if defined(__AVX2__) && !defined(__AVX512DQ__)
  if constexpr (sizeof(F) == 4) {
    *(Halves *)to = (Halves)_mm256_cvtpd_ps((__m256d)x);
    return;
  }
#endif
  *(typename Vectorised<F>::Type *)to = __builtin_convertvector(x, typename Vectorised<F>::Type);
}

// Calls body(i) for pieces of WIDTH that cover n numbers. The last may overlap with the one before.
template <class Body> inline void by_pieces(int n, const Body &body) {
  for (int i = 0; i + WIDTH < n; i += WIDTH) body(i);
  body(n - WIDTH);
}

// Rows of n < WIDTH numbers, one behind the other. A vector may be read, or written, from the first
// number of a row on if all of it belongs to these rows; what is written behind one row is overwritten
// by the next.
inline bool holds_vector(int l, int filled, int n) { return l * n + WIDTH <= filled * n; }

template <class F> inline void load_short(const F *x, int filled, int n, Lanes *block) {
  for (int l = 0; l < WIDTH; ++l) {
    const int row = l < filled ? l : 0;
    if (holds_vector(row, filled, n))
      block[l] = load_vector(x + row * n);
    else
      for (int i = 0; i < n; ++i) block[l][i] = x[row * n + i];
  }
}
template <class F> inline void store_short(const Lanes *block, int filled, int n, F *x) {
  for (int l = 0; l < WIDTH && l < filled; ++l)
    if (holds_vector(l, filled, n))
      store_vector(block[l], x + l * n);
    else
      for (int i = 0; i < n; ++i) x[l * n + i] = (F)block[l][i];
}

// Loads n numbers of each lane, whose numbers are `step` apart. Unused lanes repeat the first.
template <class R, class F>
inline void load_row(const F *x, long step, int filled, int n, R *to) {
  constexpr int lanes = Kind<R>::lanes;
  const bool short_rows = step == n && filled == lanes;
  if constexpr (lanes == 1) {
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) *(Unaligned *)(to + i) = load_vector(x + i);
    for (; i < n; ++i) to[i] = x[i];
    return;
  }
  if (n < WIDTH && !short_rows) {
    for (int l = 0; l < lanes; ++l)
      for (int i = 0; i < n; ++i)
        ((double *)to)[i * lanes + l] = x[(l < filled ? l : 0) * step + i];
    return;
  }
  if constexpr (lanes > 1)
    for (int part = 0; part < lanes / WIDTH; ++part) {
      const F *from[WIDTH];
      for (int l = 0; l < WIDTH; ++l)
        from[l] = x + (part * WIDTH + l < filled ? part * WIDTH + l : 0) * step;
      Lanes block[WIDTH];
      if (n < WIDTH) {
        load_short(from[0], filled - part * WIDTH, n, block);
        transpose(block);
        for (int i = 0; i < n; ++i) ((Lanes *)(to + i))[part] = block[i];
      } else {
        by_pieces(n, [&](int i) {
          for (int l = 0; l < WIDTH; ++l) block[l] = load_vector(from[l] + i);
          transpose(block);
          for (int l = 0; l < WIDTH; ++l) ((Lanes *)(to + i + l))[part] = block[l];
        });
      }
    }
}

// Stores n numbers of each lane, times a factor of the lane.
template <class R, class F>
inline void store_row(const R *from, R factor, long step, int filled, int n, F *x) {
  constexpr int lanes = Kind<R>::lanes;
  if constexpr (lanes == 1) {
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
      store_vector(all_of<Lanes>(factor) * *(const Unaligned *)(from + i), x + i);
    for (; i < n; ++i) x[i] = (F)(factor * from[i]);
    return;
  }
  if (n < WIDTH && step != n) {
    for (int l = 0; l < lanes && l < filled; ++l)
      for (int i = 0; i < n; ++i)
        x[l * step + i] = (F)(get(factor, l) * ((const double *)from)[i * lanes + l]);
    return;
  }
  if constexpr (lanes > 1)
    for (int part = 0; part < lanes / WIDTH; ++part) {
      const int left = filled - part * WIDTH;
      const Lanes times = ((const Lanes *)&factor)[part];
      F *to = x + part * WIDTH * step;
      if (n < WIDTH) {
        Lanes block[WIDTH] = {};
        for (int i = 0; i < n; ++i) block[i] = ((const Lanes *)(from + i))[part] * times;
        transpose(block);
        store_short(block, left, n, to);
      } else {
        by_pieces(n, [&](int i) {
          Lanes block[WIDTH];
          for (int l = 0; l < WIDTH; ++l) block[l] = ((const Lanes *)(from + i + l))[part] * times;
          transpose(block);
          for (int l = 0; l < WIDTH && l < left; ++l) store_vector(block[l], to + l * step + i);
        });
      }
    }
}

// The same for numbers whose precision is known when a kernel runs.
template <class R>
inline void load_row(Source x, long step, int filled, int n, R *to) {
  x.visit([&](const auto *from) { load_row<R>(from, step, filled, n, to); });
}
template <class R>
inline void store_row(const R *from, R factor, long step, int filled, int n,
                                         Target x) {
  x.visit([&](auto *to) { store_row<R>(from, factor, step, filled, n, to); });
}

// The same for entries, the parts of which are next to each other; `step` counts entries.
template <class S>
inline void load_entries(Source x, long step, int filled, int n, typename S::Number *to) {
  if constexpr (S::along_rows && S::parts == 2) {
    x.visit([&](const auto *from) {
      for (int i = 0; i < n; ++i)
        for (int part = 0; part < 2; ++part) to[S::place(i, part)] = from[2 * i + part];
    });
  } else {
    load_row(x, step * S::parts, filled, n * S::parts, to);
  }
}
template <class S>
inline void store_entries(const typename S::Number *from, typename S::Number factor, long step,
                          int filled, int n, Target x) {
  if constexpr (S::along_rows && S::parts == 2) {
    x.visit([&](auto *to) {
      using F = std::remove_reference_t<decltype(*to)>;
      for (int i = 0; i < n; ++i)
        for (int part = 0; part < 2; ++part)
          to[2 * i + part] = (F)(factor * from[S::place(i, part)]);
    });
  } else {
    store_row(from, factor, step * S::parts, filled, n * S::parts, x);
  }
}

// Marks the lanes that are not good as failed, and returns how many these are.
template <class R>
inline long report(MaskOf<R> good, long first, int filled, uint8_t *failed) {
  for (int l = 0; l < filled && failed; ++l) failed[first + l] = false;
  if (!any(negate(good))) return 0;
  long many = 0;
  for (int l = 0; l < filled; ++l) {
    const bool bad = !is_set(good, l);
    if (failed) failed[first + l] = bad;
    many += bad;
  }
  return many;
}

// Which sign makes the sum of the entries positive or, if that is zero, the second product.
template <class R>
inline R sign_of(const R *z, int n, const double *second, R tolerance) {
  R first = all_of<R>(0), other = first;
  for (int i = 0; i < n; ++i) {
    first += z[i];
    other += z[i] * all_of<R>(second[i]);
  }
  const R decides = choose(size_of(first) <= tolerance, other, first);
  return choose(decides < all_of<R>(0), all_of<R>(-1), all_of<R>(1));
}

}  // namespace
}  // namespace pmaf
