// The reduction A = QTQᵀ of a real matrix, kept from the forward pass for the backward pass, in which
// (λI − A)z = v becomes a tridiagonal system between two applications of Q.
#pragma once

#include "storage.hpp"

namespace pmaf {
namespace {

// Where everything is in the memory of one matrix. All parts are aligned, as vectors are.
struct Reduction {
  int n, k, stride, values_width;
  double *start;

  Reduction(int n, int k, double *start)
      : n(n), k(k), stride(Medium::stride_of(n)), values_width(Medium::stride_of(k + 1)),
        start(start) {}

  double *tau() const { return start; }
  double *d() const { return start + stride; }
  double *e() const { return start + 2 * stride; }
  double *row(int j) const { return start + (3 + j) * stride; }  // an eigenvector of T
  double *values() const { return start + (3 + k) * stride; }    // the eigenvalues of T
  double &unit() const { return values()[k]; }                   // by which A was divided

  // Where column 0 of reflector i would be: it has no entries before the vector with column i + 1.
  long place(int i) const {
    const long c = vectors_before(i + 1), left = (i + 1) % WIDTH;
    // Before it are i reflectors, which begin with the vectors of the columns 1, 2, … i.
    const long skipped = WIDTH * WIDTH * (c * (c - 1) / 2) + WIDTH * left * c;
    return (3 + k) * stride + values_width + (long)i * stride - skipped - c * WIDTH;
  }
  static long numbers(int n, int k) {
    const int end = n - 2;  // there are so many reflectors
    return Reduction(n, k, nullptr).place(end) + vectors_before(end + 1) * WIDTH;
  }

  void store(const double *a, const double *tau_, const double *d_, const double *e_) const {
    for (int i = 0; i < n; ++i) tau()[i] = tau_[i], d()[i] = d_[i], e()[i] = e_[i];
    for (int i = 0; i + 2 < n; ++i)
      for (int c = vectors_before(i + 1); c < stride / WIDTH; ++c)
        at(start + place(i))[c] = at(a + (long)i * stride)[c];
  }

  // One reflector, for all rows of z.
  void reflect(int i, double *z, int rows) const {
    const double *v = start + place(i);
    for (int j = 0; j < rows; ++j) {
      double *row = z + (long)j * stride;
      add_from<double>(row, -tau()[i] * dot_from<double>(v, row, i + 1, stride), v, i + 1, stride);
    }
  }
  // z ← Qᵀz
  void turn(double *z, int rows) const {
    for (int i = 0; i + 2 < n; ++i) reflect(i, z, rows);
  }
  // z ← Qz
  void turn_back(double *z, int rows) const {
    for (int i = n - 3; i >= 0; --i) reflect(i, z, rows);
  }
};

// Systems (λI − T)w = t, one in each lane, each with its T, the λ of an eigenvector s, and w orthogonal
// to s.
//
// Without row and column r, where s is largest, λI − T falls into two blocks, and by interlacing none of
// them is singular if λ is simple: the distance of their eigenvalues from λ is at least s[r]² times the
// gap. So w is their solution with w[r] = 0, but for a multiple of s. For an eigenvalue inside of the
// spectrum a pivot may be small, and the solution inexact: its residual shows that.
template <class R> struct ShiftedTridiagonal {
  int n;
  const R *d, *e;
  R shift, removed;  // λ and r
  R *down, *up;      // reciprocals of the pivots of both blocks, n each
  R *spare;          // n

  void factor() {
    const R least = all_of<R>(PIVOT), one = all_of<R>(1);
    for (int i = 0; i < n; ++i) {
      const int l = n - 1 - i;
      R q = shift - d[i], p = shift - d[l];
      if (i > 0) {
        q -= e[i - 1] * e[i - 1] * down[i - 1];
        p -= e[l] * e[l] * up[l + 1];
      }
      down[i] = one / away_from_zero(q, least);
      up[l] = one / away_from_zero(p, least);
    }
  }

  void solve(const R *t, R *w) const {
    const R none = all_of<R>(0);
    R *below = spare;  // what is left of t in the second block; `w` holds that of the first
    w[0] = t[0];
    below[n - 1] = t[n - 1];
    for (int i = 1; i < n; ++i) {
      const int l = n - 1 - i;
      w[i] = t[i] + e[i - 1] * down[i - 1] * w[i - 1];
      below[l] = t[l] + e[l] * up[l + 1] * below[l + 1];
    }
    R next = none;
    for (int i = n - 1; i >= 0; --i) {
      const R found = down[i] * (w[i] + (i + 1 < n ? e[i] * next : none));
      w[i] = next = choose(all_of<R>(i) < removed, found, none);
    }
    next = none;
    for (int i = 0; i < n; ++i) {
      const R found = up[i] * (below[i] + (i > 0 ? e[i - 1] * next : none));
      next = choose(all_of<R>(i) > removed, found, none);
      w[i] += next;
    }
  }

  // rest ← t − (λI − T)w
  void residual(const R *t, const R *w, R *rest) const {
    for (int i = 0; i < n; ++i) {
      R sum = t[i] - (shift - d[i]) * w[i];
      if (i > 0) sum += e[i - 1] * w[i - 1];
      if (i + 1 < n) sum += e[i] * w[i + 1];
      rest[i] = sum;
    }
  }
};

}  // namespace
}  // namespace pmaf
