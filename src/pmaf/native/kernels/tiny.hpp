// Tiny symmetric matrices, WIDTH at a time or one by itself, wholly unrolled for n = 2, 3, 4.
#pragma once

#include "tridiagonal.hpp"

namespace pmaf {
namespace {

// Householder's reduction A = QTQᵀ of the lower triangle of A, row by row in `a`. The reflectors
// I − τvvᵀ, with v[i+1] = 1, replace the columns of A below the subdiagonal.
template <int N, class R> inline void reduce(R *a, int size, R *d, R *e, R *tau, R *work) {
  const int n = N ? N : size;
  const R one = all_of<R>(1), none = all_of<R>(0), half = all_of<R>(0.5);
  R *v = work, *p = work + n;
  for (int i = 0; i + 2 < n; ++i) {
    const R alpha = a[(i + 1) * n + i];
    R rest = none;
    for (int j = i + 2; j < n; ++j) rest += a[j * n + i] * a[j * n + i];
    const MaskOf<R> flat = rest == none;
    const R length = root(alpha * alpha + rest), beta = choose(alpha > none, -length, length);
    const R scale = choose(flat, none, one / choose(flat, one, alpha - beta));
    tau[i] = choose(flat, none, (beta - alpha) / choose(flat, one, beta));
    e[i] = choose(flat, alpha, beta);
    v[i + 1] = one;
    for (int j = i + 2; j < n; ++j) a[j * n + i] = v[j] = a[j * n + i] * scale;
    for (int j = i + 1; j < n; ++j) {
      R sum = a[j * n + j] * v[j];
      for (int l = i + 1; l < j; ++l) {
        sum += a[j * n + l] * v[l];
        p[l] += a[j * n + l] * v[j];
      }
      p[j] = sum;
    }
    R along = none;
    for (int j = i + 1; j < n; ++j) along += p[j] * v[j];
    along *= half * tau[i];
    for (int j = i + 1; j < n; ++j) p[j] = tau[i] * (p[j] - along * v[j]);
    for (int j = i + 1; j < n; ++j)
      for (int l = i + 1; l <= j; ++l) a[j * n + l] -= v[j] * p[l] + p[j] * v[l];
  }
  for (int i = 0; i < n; ++i) d[i] = a[i * n + i];
  if (n > 1) e[n - 2] = a[(n - 1) * n + n - 2];
}

template <class R> inline void reflect(const R *a, int n, int i, R tau, R *z) {
  R along = z[i + 1];
  for (int j = i + 2; j < n; ++j) along += a[j * n + i] * z[j];
  along *= tau;
  z[i + 1] -= along;
  for (int j = i + 2; j < n; ++j) z[j] -= along * a[j * n + i];
}

// z ← Qz
template <int N, class R> inline void turn_back(const R *a, int size, const R *tau, R *z) {
  const int n = N ? N : size;
  for (int i = n - 3; i >= 0; --i) reflect(a, n, i, tau[i], z);
}

// z ← Qᵀz
template <int N, class R> inline void turn(const R *a, int size, const R *tau, R *z) {
  const int n = N ? N : size;
  for (int i = 0; i + 2 < n; ++i) reflect(a, n, i, tau[i], z);
}

// Cholesky's factorisation LDLᵀ of the lower triangle of a positive definite matrix, in place; the
// reciprocals of D replace the diagonal. A pivot below `least`, which is rounding, is replaced by
// −least. Returns where all pivots are positive.
template <int N, class R> inline MaskOf<R> factor(R *a, int size, R least) {
  const int n = N ? N : size;
  const R one = all_of<R>(1), none = all_of<R>(0);
  MaskOf<R> good = one > none;
  for (int c = 0; c < n; ++c) {
    const R pivot = away_from_zero(a[c * n + c], least), inverse = one / pivot;
    good = both(good, pivot > none);
    for (int r = c + 1; r < n; ++r) {
      const R ratio = a[r * n + c] * inverse;
      for (int l = c + 1; l < r; ++l) a[r * n + l] -= ratio * a[l * n + c];
      a[r * n + r] -= ratio * a[r * n + c];
    }
    // The column is divided last, because the rows below needed it undivided.
    for (int r = c + 1; r < n; ++r) a[r * n + c] *= inverse;
    a[c * n + c] = inverse;
  }
  return good;
}

template <int N, class R> inline void solve(const R *a, int size, R *x) {
  const int n = N ? N : size;
  for (int r = 1; r < n; ++r) {
    R sum = x[r];
    for (int l = 0; l < r; ++l) sum -= a[r * n + l] * x[l];
    x[r] = sum;
  }
  for (int r = n - 1; r >= 0; --r) {
    R sum = x[r] * a[r * n + r];
    for (int l = r + 1; l < n; ++l) sum -= a[l * n + r] * x[l];
    x[r] = sum;
  }
}

}  // namespace
}  // namespace pmaf
