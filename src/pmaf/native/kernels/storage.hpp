// How matrices are stored: many tiny ones in the lanes of vectors, or one by itself.
#pragma once

#include "medium.hpp"
#include "tiny.hpp"

namespace pmaf {
namespace {

template <int N, class R> struct Tiny {
  using Number = R;
  static constexpr bool along_rows = false;
  static int stride_of(int n) { return n; }
  static void reduce(R *a, int n, int, R *d, R *e, R *tau, R *work) {
    pmaf::reduce<N, R>(a, n, d, e, tau, work);
  }
  static void turn_back(const R *a, int n, int, const R *tau, R *z) {
    pmaf::turn_back<N, R>(a, n, tau, z);
  }
  static void turn(const R *a, int n, int, const R *tau, R *z) { pmaf::turn<N, R>(a, n, tau, z); }
  static void product(const R *a, int size, int, const R *x, R *image) {
    const int n = N ? N : size;
    for (int i = 0; i < n; ++i) {
      R sum = all_of<R>(0);
      for (int j = 0; j < n; ++j) sum += a[i * n + j] * x[j];
      image[i] = sum;
    }
  }
  static MaskOf<R> factor(R *a, int n, int, R *, R least) {
    return pmaf::factor<N, R>(a, n, least);
  }
  static void solve(const R *a, int n, int, const R *, R *x) { pmaf::solve<N, R>(a, n, x); }
};

struct Medium {
  using Number = double;
  static constexpr bool along_rows = true;
  static int stride_of(int n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }
  static void reduce(double *a, int n, int stride, double *d, double *e, double *tau,
                     double *work) {
    reduce_rows(a, n, stride, d, e, tau, work);
  }
  static void turn_back(const double *a, int n, int stride, const double *tau, double *z) {
    turn_rows_back(a, n, stride, tau, z);
  }
  static void turn(const double *a, int n, int stride, const double *tau, double *z) {
    turn_rows(a, n, stride, tau, z);
  }
  // `image` holds 2·stride numbers.
  static void product(const double *a, int n, int stride, const double *x, double *image) {
    double *rows = const_cast<double *>(a);  // which are not changed
    pass_all<false>(rows, n, stride, 0, nullptr, nullptr, x, image, image + stride);
  }
  static bool factor(double *a, int n, int stride, double *inverse, double least) {
    return factor_rows(a, n, stride, inverse, least);
  }
  static void solve(const double *a, int n, int stride, const double *inverse, double *x) {
    solve_rows(a, n, stride, inverse, x);
  }
};

typedef double Unaligned __attribute__((vector_size(8 * WIDTH), aligned(8)));

template <class R> inline R dot(const R *x, const R *y, int n) {
  R sum = all_of<R>(0);
  int i = 0;
  if constexpr (Kind<R>::lanes == 1) {
    Lanes sums = all_of<Lanes>(0);
    for (; i + WIDTH <= n; i += WIDTH)
      sums += *(const Unaligned *)(x + i) * *(const Unaligned *)(y + i);
    sum = total(sums);
  }
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
template <class R> inline void add(R *x, R factor, const R *y, int n) {
  for (int i = 0; i < n; ++i) x[i] += factor * y[i];
}

template <class R> inline void orthogonal_to(R *x, const R *y, int n) {
  add(x, -dot(x, y, n), y, n);
}

// Vector j of `many` with n numbers, of each matrix: they are rows, or columns.
struct Place {
  long start, stride;
  Place(int j, int many, int n, int columns)
      : start(columns ? j : (long)j * n), stride(columns ? many : 1) {}
};

template <class R, class F>
inline void load_row(const F *x, long step, int filled, int n, R *to, long stride = 1) {
  constexpr int lanes = Kind<R>::lanes;
  for (int l = 0; l < lanes; ++l) {
    const F *from = x + (l < filled ? l : 0) * step;
    for (int i = 0; i < n; ++i) ((double *)to)[i * lanes + l] = from[i * stride];
  }
}

// About the power of two below x, so that its reciprocal is in range; one for zero and for what is
// not finite.
inline double power_of_two(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  bits &= 0x7ff0000000000000u;
  if (bits == 0 || bits == 0x7ff0000000000000u) return x > 0 && x < 1 ? 0x1p-1022 : 1;
  double power;
  __builtin_memcpy(&power, &bits, 8);
  return power > 0x1p1022 ? 0x1p1022 : power;
}

// Which sign makes the sum of the entries positive or, if that is zero, the second product.
template <class R>
inline R sign_of(const R *z, int n, const double *second, double tolerance) {
  R first = all_of<R>(0), other = first;
  for (int i = 0; i < n; ++i) {
    first += z[i];
    other += z[i] * all_of<R>(second[i]);
  }
  const R decides = choose(size_of(first) <= all_of<R>(tolerance), other, first);
  return choose(decides < all_of<R>(0), all_of<R>(-1), all_of<R>(1));
}

}  // namespace
}  // namespace pmaf
