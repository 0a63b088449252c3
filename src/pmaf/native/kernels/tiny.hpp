// Tiny symmetric and Hermitian matrices, WIDTH at a time or one by itself, wholly unrolled for real
// ones with n = 2, 3, 4.
#pragma once

#include "tridiagonal.hpp"

namespace pmaf {
namespace {

// A reflector I − τvvᴴ, with v = 1 in front, whose conjugate transpose turns a vector into a real
// multiple of the first unit vector.
template <class X> struct Reflector {
  RealOf<X> beta;  // that multiple
  X tau, scale;    // v is `scale` times the vector, behind its first entry
};

// For a vector with `alpha` in front, behind which the squares sum to `rest`.
template <class X> inline Reflector<X> reflector(X alpha, RealOf<X> rest) {
  using R = RealOf<X>;
  const R none = all_of<R>(0), front = real_part(alpha);
  const X one = from_real<X>(all_of<R>(1)), zero = from_real<X>(none);
  if constexpr (PARTS<X> == 2) rest += imaginary_part(alpha) * imaginary_part(alpha);
  const MaskOf<R> flat = rest == none;
  const R length = root(front * front + rest), beta = choose(front > none, -length, length);
  const X step = from_real<X>(beta) - alpha, divisor = choose(flat, one, -step);
  return {choose(flat, front, beta), choose(flat, zero, step / choose(flat, all_of<R>(1), beta)),
          choose(flat, zero, reciprocal(divisor))};
}

// The reduction ends so many rows before the last. The last subdiagonal entry of a complex matrix has
// a phase, which a reflector of one number removes.
template <class X> constexpr int UNREDUCED = PARTS<X> == 2 ? 1 : 2;

// Householder's reduction A = QTQᴴ of the lower triangle of A, row by row in `a`, to a real T. The
// reflectors I − τvvᴴ, with v[i+1] = 1, replace the columns of A below the subdiagonal.
template <int N, class X>
inline void reduce(X *a, int size, RealOf<X> *d, RealOf<X> *e, X *tau, X *work) {
  using R = RealOf<X>;
  const int n = N ? N : size;
  const R none = all_of<R>(0), half = all_of<R>(0.5);
  X *v = work, *p = work + n;
  for (int i = 0; i + UNREDUCED<X> < n; ++i) {
    R rest = none;
    for (int j = i + 2; j < n; ++j) rest += square_of(a[j * n + i]);
    const Reflector<X> r = reflector(a[(i + 1) * n + i], rest);
    tau[i] = r.tau;
    e[i] = r.beta;
    v[i + 1] = from_real<X>(all_of<R>(1));
    for (int j = i + 2; j < n; ++j) a[j * n + i] = v[j] = a[j * n + i] * r.scale;
    for (int j = i + 1; j < n; ++j) {
      X sum = a[j * n + j] * v[j];
      for (int l = i + 1; l < j; ++l) {
        sum += a[j * n + l] * v[l];
        p[l] += conjugate(a[j * n + l]) * v[j];
      }
      p[j] = sum;
    }
    X along = from_real<X>(none);
    for (int j = i + 1; j < n; ++j) along += conjugate(v[j]) * p[j];
    along = along * (conjugate(r.tau) * half);
    for (int j = i + 1; j < n; ++j) p[j] = r.tau * (p[j] - along * v[j]);
    for (int j = i + 1; j < n; ++j)
      for (int l = i + 1; l <= j; ++l)
        a[j * n + l] -= v[j] * conjugate(p[l]) + p[j] * conjugate(v[l]);
  }
  for (int i = 0; i < n; ++i) d[i] = real_part(a[i * n + i]);
  if (n > 1 && UNREDUCED<X> == 2) e[n - 2] = real_part(a[(n - 1) * n + n - 2]);
}

template <class X> inline void reflect(const X *a, int n, int i, X tau, X *z) {
  X along = z[i + 1];
  for (int j = i + 2; j < n; ++j) along += conjugate(a[j * n + i]) * z[j];
  along = along * tau;
  z[i + 1] -= along;
  for (int j = i + 2; j < n; ++j) z[j] -= along * a[j * n + i];
}

// z ← Qz
template <int N, class X> inline void turn_back(const X *a, int size, const X *tau, X *z) {
  const int n = N ? N : size;
  for (int i = n - 1 - UNREDUCED<X>; i >= 0; --i) reflect(a, n, i, tau[i], z);
}

// z ← Qᴴz
template <int N, class X> inline void turn(const X *a, int size, const X *tau, X *z) {
  const int n = N ? N : size;
  for (int i = 0; i + UNREDUCED<X> < n; ++i) reflect(a, n, i, conjugate(tau[i]), z);
}

// Cholesky's factorisation LDLᴴ of the lower triangle of a positive definite matrix, in place; the
// reciprocals of D replace the diagonal. A pivot below `least`, which is rounding, is replaced by
// −least. Returns where all pivots are positive.
template <int N, class X> inline MaskOf<RealOf<X>> factor(X *a, int size, RealOf<X> least) {
  using R = RealOf<X>;
  const int n = N ? N : size;
  const R one = all_of<R>(1), none = all_of<R>(0);
  MaskOf<R> good = one > none;
  for (int c = 0; c < n; ++c) {
    const R pivot = away_from_zero(real_part(a[c * n + c]), least), inverse = one / pivot;
    good = both(good, pivot > none);
    for (int r = c + 1; r < n; ++r) {
      const X ratio = a[r * n + c] * inverse;
      for (int l = c + 1; l <= r; ++l) a[r * n + l] -= ratio * conjugate(a[l * n + c]);
    }
    // The column is divided last, because the rows below needed it undivided.
    for (int r = c + 1; r < n; ++r) a[r * n + c] *= inverse;
    a[c * n + c] = from_real<X>(inverse);
  }
  return good;
}

// x ← L⁻¹x
template <int N, class X> inline void solve_lower(const X *a, int size, X *x) {
  const int n = N ? N : size;
  for (int r = 1; r < n; ++r) {
    X sum = x[r];
    for (int l = 0; l < r; ++l) sum -= a[r * n + l] * x[l];
    x[r] = sum;
  }
}

// x ← L⁻ᴴx
template <int N, class X> inline void solve_upper(const X *a, int size, X *x) {
  const int n = N ? N : size;
  for (int r = n - 2; r >= 0; --r) {
    X sum = x[r];
    for (int l = r + 1; l < n; ++l) sum -= conjugate(a[l * n + r]) * x[l];
    x[r] = sum;
  }
}

template <int N, class X> inline void solve(const X *a, int size, X *x) {
  const int n = N ? N : size;
  solve_lower<N>(a, n, x);
  for (int r = 0; r < n; ++r) x[r] = x[r] * real_part(a[r * n + r]);
  solve_upper<N>(a, n, x);
}

// A ← D^(−½)L⁻¹AL⁻ᴴD^(−½), both triangles, for the factor LDLᴴ of another matrix. `scales` holds n
// numbers.
template <int N, class X>
inline void congruent(const X *lower, int size, X *a, RealOf<X> *scales) {
  const int n = N ? N : size;
  for (int r = 0; r < n; ++r) scales[r] = root(real_part(lower[r * n + r]));
  for (int r = 1; r < n; ++r)
    for (int c = 0; c < r; ++c)
      for (int l = 0; l < n; ++l) a[r * n + l] -= lower[r * n + c] * a[c * n + l];
  for (int r = 1; r < n; ++r)
    for (int c = 0; c < r; ++c)
      for (int l = r; l < n; ++l) a[l * n + r] -= conjugate(lower[r * n + c]) * a[l * n + c];
  for (int r = 0; r < n; ++r)
    for (int l = 0; l <= r; ++l) {
      a[r * n + l] *= scales[r] * scales[l];
      a[l * n + r] = conjugate(a[r * n + l]);
    }
}

}  // namespace
}  // namespace pmaf
