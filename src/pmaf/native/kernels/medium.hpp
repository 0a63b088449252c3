// Symmetric matrices from about twenty rows on, one at a time, with vectors along their rows.
//
// Rows have a stride of a multiple of WIDTH, are aligned, and end in zeros. A loop over the columns
// from c on starts at the vector that contains c.
#pragma once

#include "tridiagonal.hpp"

namespace pmaf {
namespace {

inline int vectors_before(int column) { return column / WIDTH; }
inline Lanes *at(double *x) { return (Lanes *)x; }
inline const Lanes *at(const double *x) { return (const Lanes *)x; }

inline double dot_from(const double *x, const double *y, int column, int stride) {
  Lanes sum = all_of<Lanes>(0);
  for (int c = vectors_before(column); c < stride / WIDTH; ++c) sum += at(x)[c] * at(y)[c];
  return total(sum);
}
inline void add_from(double *x, double factor, const double *y, int column, int stride) {
  const Lanes f = all_of<Lanes>(factor);
  for (int c = vectors_before(column); c < stride / WIDTH; ++c) at(x)[c] += f * at(y)[c];
}

// Subtracts vwᵀ + wvᵀ from rows j to j + ROWS − 1, and adds to `image` what the product of the matrix
// with `next` has from them.
//
// Of each row, the vector with its diagonal entry and those behind it are used. An entry behind that
// vector stands for its mirror image, too, and counts for both; the others have one of their own.
template <int ROWS, bool UPDATE>
inline void pass(double *a, int stride, int j, const double *v, const double *w,
                 const double *next, double *image, double *side) {
  Lanes vs[ROWS], ws[ROWS], ns[ROWS], sums[ROWS];
  Lanes *rows[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    if (UPDATE) vs[r] = all_of<Lanes>(v[j + r]), ws[r] = all_of<Lanes>(w[j + r]);
    ns[r] = all_of<Lanes>(next[j + r]);
    sums[r] = all_of<Lanes>(0);
    rows[r] = at(a + (j + r) * stride);
  }
  const int diagonal = vectors_before(j);
  for (int c = diagonal; c < stride / WIDTH; ++c) {
    Lanes sum = at(image)[c];
    const Lanes left = at(next)[c];
    Lanes vc, wc;
    if (UPDATE) vc = at(v)[c], wc = at(w)[c];
    for (int r = 0; r < ROWS; ++r) {
      Lanes x = rows[r][c];
      if (UPDATE) {
        x -= vs[r] * wc + ws[r] * vc;
        rows[r][c] = x;
      }
      sum += ns[r] * x;
      sums[r] += left * x;
    }
    at(image)[c] = sum;
    if (c == diagonal)
      for (int r = 0; r < ROWS; ++r) sums[r] = all_of<Lanes>(0);
  }
  // Not added to `image`: to write numbers and to read them as a vector takes long.
  for (int r = 0; r < ROWS; ++r) side[j + r] = total(sums[r]);
}

template <bool UPDATE>
inline void pass_all(double *a, int n, int stride, int first, const double *v, const double *w,
                     const double *next, double *image, double *side) {
  constexpr int ROWS = WIDTH < 4 ? WIDTH : 4;
  for (int c = vectors_before(first); c < stride / WIDTH; ++c)
    at(image)[c] = at(side)[c] = all_of<Lanes>(0);
  int j = first;
  for (; j < n && j % ROWS; ++j) pass<1, UPDATE>(a, stride, j, v, w, next, image, side);
  for (; j + ROWS <= n; j += ROWS) pass<ROWS, UPDATE>(a, stride, j, v, w, next, image, side);
  for (; j < n; ++j) pass<1, UPDATE>(a, stride, j, v, w, next, image, side);
  for (int c = vectors_before(first); c < stride / WIDTH; ++c) at(image)[c] += at(side)[c];
}

// The lanes of vector c that hold columns behind `column`.
inline LaneMask behind(int c, int column) {
  LaneMask lanes;
  for (int l = 0; l < WIDTH; ++l) lanes[l] = l;
  return lanes > (LaneMask{} + (int64_t)(column - c * WIDTH));
}

// Householder's reduction A = QTQᵀ of a symmetric matrix by its upper triangle and the vectors on its
// diagonal. Row i of `a` becomes the reflector I − τvvᵀ. The rank-two update of a step and the product of the next step are one pass over the
// matrix. `work` holds 5·stride numbers.
inline void reduce_rows(double *a, int n, int stride, double *d, double *e, double *tau,
                        double *work) {
  double *v = work, *w = v + stride, *next = w + stride, *image = next + stride,
         *side = image + stride;
  const int vectors = stride / WIDTH;
  for (int i = 0; i < 5 * stride; ++i) work[i] = 0;
  for (int i = 0; i < n; ++i) {
    double *row = a + i * stride;
    if (i > 0) {
      const Lanes factor = all_of<Lanes>(v[i]), other = all_of<Lanes>(w[i]);
      for (int c = vectors_before(i); c < vectors; ++c)
        at(row)[c] -= factor * at(w)[c] + other * at(v)[c];
    }
    d[i] = row[i];
    if (i + 1 >= n) break;
    if (i + 2 >= n) {
      e[i] = row[i + 1];
      double *last = a + (i + 1) * stride;
      d[i + 1] = last[i + 1] - (i > 0 ? 2 * v[i + 1] * w[i + 1] : 0);
      break;
    }
    const int begin = vectors_before(i + 1);
    const Lanes none = all_of<Lanes>(0);
    const double alpha = row[i + 1];
    const Lanes head = choose(behind(begin, i + 1), at(row)[begin], none);
    Lanes squares = head * head;
    for (int c = begin + 1; c < vectors; ++c) squares += at(row)[c] * at(row)[c];
    const double rest = total(squares);
    double factor = 0;
    if (rest == 0) {
      tau[i] = 0;
      e[i] = alpha;
    } else {
      const double length = root(alpha * alpha + rest), beta = alpha > 0 ? -length : length;
      tau[i] = (beta - alpha) / beta;
      e[i] = beta;
      factor = 1 / (alpha - beta);
    }
    const Lanes scale = all_of<Lanes>(factor);
    const LaneMask one = behind(begin, i) & ~behind(begin, i + 1);
    at(next)[begin] = at(row)[begin] = choose(one, all_of<Lanes>(1), head * scale);
    for (int c = begin + 1; c < vectors; ++c) at(next)[c] = at(row)[c] = at(row)[c] * scale;
    if (i > 0)
      pass_all<true>(a, n, stride, i + 1, v, w, next, image, side);
    else
      pass_all<false>(a, n, stride, i + 1, v, w, next, image, side);
    const double along = 0.5 * tau[i] * dot_from(image, next, i + 1, stride);
    const Lanes t = all_of<Lanes>(tau[i]), shift = all_of<Lanes>(along);
    for (int c = begin; c < vectors; ++c) {
      at(v)[c] = at(next)[c];
      at(w)[c] = t * (at(image)[c] - shift * at(next)[c]);
    }
  }
}

// z ← Qz
inline void turn_rows_back(const double *a, int n, int stride, const double *tau, double *z) {
  for (int i = n - 3; i >= 0; --i) {
    const double *v = a + i * stride;
    add_from(z, -tau[i] * dot_from(v, z, i + 1, stride), v, i + 1, stride);
  }
}

// z ← Qᵀz
inline void turn_rows(const double *a, int n, int stride, const double *tau, double *z) {
  for (int i = 0; i + 2 < n; ++i) {
    const double *v = a + i * stride;
    add_from(z, -tau[i] * dot_from(v, z, i + 1, stride), v, i + 1, stride);
  }
}

// Cholesky's factorisation UᵀDU of a positive definite matrix, by its upper triangle, four rows at a
// time. U has ones on its diagonal, which are stored as zeros; `inverse` holds 1/D. A pivot below
// `least`, which is rounding, is replaced by −least. Returns whether all pivots are positive.
inline bool factor_rows(double *a, int n, int stride, double *inverse, double least) {
  bool good = true;
  for (int c = 0; c < n; c += 4) {
    const int many = n - c < 4 ? n - c : 4;
    for (int t = 0; t < many; ++t) {
      double *row = a + (c + t) * stride;
      for (int s = 0; s < t; ++s) {
        const double *other = a + (c + s) * stride;
        add_from(row, -other[c + t] * inverse[c + s], other, c + t, stride);
      }
      const double pivot = away_from_zero(row[c + t], least);
      good = good && pivot > 0;
      inverse[c + t] = 1 / pivot;
    }
    if (many == 4) {
      const Lanes *r0 = at(a + c * stride), *r1 = at(a + (c + 1) * stride),
                  *r2 = at(a + (c + 2) * stride), *r3 = at(a + (c + 3) * stride);
      const double *p0 = (const double *)r0, *p1 = (const double *)r1, *p2 = (const double *)r2,
                   *p3 = (const double *)r3;
      for (int r = c + 4; r < n; ++r) {
        const Lanes f0 = all_of<Lanes>(p0[r] * inverse[c]),
                    f1 = all_of<Lanes>(p1[r] * inverse[c + 1]),
                    f2 = all_of<Lanes>(p2[r] * inverse[c + 2]),
                    f3 = all_of<Lanes>(p3[r] * inverse[c + 3]);
        Lanes *row = at(a + r * stride);
        for (int l = vectors_before(r); l < stride / WIDTH; ++l)
          row[l] -= (f0 * r0[l] + f1 * r1[l]) + (f2 * r2[l] + f3 * r3[l]);
      }
    }
  }
  for (int c = 0; c < n; ++c) {
    double *row = a + c * stride;
    const Lanes scale = all_of<Lanes>(inverse[c]);
    for (int l = vectors_before(c) * WIDTH; l <= c; ++l) row[l] = 0;
    for (int l = vectors_before(c); l < stride / WIDTH; ++l) at(row)[l] *= scale;
  }
  return good;
}

inline void solve_rows(const double *a, int n, int stride, const double *inverse, double *x) {
  for (int c = 0; c < n; ++c) add_from(x, -x[c], a + c * stride, c, stride);
  for (int c = 0; c < n; ++c) x[c] *= inverse[c];
  for (int c = n - 1; c >= 0; --c) x[c] -= dot_from(a + c * stride, x, c, stride);
}

}  // namespace
}  // namespace pmaf
