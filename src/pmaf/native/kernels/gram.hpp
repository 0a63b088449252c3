// Products AᵀA, or AAᵀ for a wide A, in double precision, and others with A itself.
#pragma once

#include "storage.hpp"

namespace pmaf {
namespace {

constexpr int BLOCK = 4;  // rows of one matrix that are multiplied at a time

// image ← the products of so many rows of n numbers with x
template <int ROWS> inline void rows_times(const float *A, int n, const double *x, double *image) {
  Lanes sums[ROWS];
  for (int i = 0; i < ROWS; ++i) sums[i] = all_of<Lanes>(0);
  int j = 0;
  for (; j + WIDTH <= n; j += WIDTH) {
    const Lanes right = *(const Unaligned *)(x + j);
    for (int i = 0; i < ROWS; ++i) sums[i] += load_vector(A + (long)i * n + j) * right;
  }
  for (int i = 0; i < ROWS; ++i) {
    double sum = total(sums[i]);
    for (int l = j; l < n; ++l) sum += A[(long)i * n + l] * x[l];
    image[i] = sum;
  }
}

// y ← y + the sum of so many rows, times the numbers x
template <int ROWS> inline void add_rows(const float *A, int n, const double *x, double *y) {
  int j = 0;
  for (; j + WIDTH <= n; j += WIDTH) {
    Lanes sum = *(const Unaligned *)(y + j);
    for (int i = 0; i < ROWS; ++i) sum += all_of<Lanes>(x[i]) * load_vector(A + (long)i * n + j);
    *(Unaligned *)(y + j) = sum;
  }
  for (; j < n; ++j)
    for (int i = 0; i < ROWS; ++i) y[j] += A[(long)i * n + j] * x[i];
}

// Matrices (m, n) of float, one in each lane. Unused lanes repeat the first matrix.
template <class R> struct Wrapped {
  const float *A;
  int m, n, filled;
  R *copy;  // the matrices, interleaved, if they are small

  // How many numbers are copied.
  static long copied(int m, int n) {
    return Kind<R>::lanes > 1 && (long)m * n <= 8192 ? (long)m * n : 0;
  }
  void interleave() {
    if (!copied(m, n)) copy = nullptr;
    if (copy) load_row(A, (long)m * n, filled, m * n, copy);
  }
  R at(int i, int j) const {
    if (copy) return copy[i * n + j];
    R x;
    for (int l = 0; l < Kind<R>::lanes; ++l)
      put(x, l, (double)A[((long)(l < filled ? l : 0) * m + i) * n + j]);
    return x;
  }
  // The product of row i with x.
  R along(int i, const R *x) const {
    if (copy) return dot(copy + (long)i * n, x, n);
    R sum = all_of<R>(0);
    for (int j = 0; j < n; ++j) sum += at(i, j) * x[j];
    return sum;
  }
  // y ← y + factor times row i
  void add_row(int i, R factor, R *y) const {
    if (copy) return add(y, factor, copy + (long)i * n, n);
    for (int j = 0; j < n; ++j) y[j] += at(i, j) * factor;
  }
  // image ← Ax
  void times(const R *x, R *image) const {
    if constexpr (Kind<R>::lanes == 1) {
      int i = 0;
      for (; i + BLOCK <= m; i += BLOCK) rows_times<BLOCK>(A + (long)i * n, n, x, image + i);
      for (; i < m; ++i) rows_times<1>(A + (long)i * n, n, x, image + i);
      return;
    }
    for (int i = 0; i < m; ++i) image[i] = along(i, x);
  }
  // image ← image + Aᵀx
  void add_transposed(const R *x, R *image) const {
    if constexpr (Kind<R>::lanes == 1) {
      int i = 0;
      for (; i + BLOCK <= m; i += BLOCK) add_rows<BLOCK>(A + (long)i * n, n, x + i, image);
      for (; i < m; ++i) add_rows<1>(A + (long)i * n, n, x + i, image);
      return;
    }
    for (int i = 0; i < m; ++i) add_row(i, x[i], image);
  }
};

// The smaller of AᵀA and AAᵀ, both triangles, for tiny matrices.
template <class R> inline void tiny_gram(const Wrapped<R> &A, R *G, R *row) {
  const bool tall = A.m >= A.n;
  const int p = tall ? A.n : A.m, q = tall ? A.m : A.n;
  for (int i = 0; i < p * p; ++i) G[i] = all_of<R>(0);
  for (int k = 0; k < q; ++k) {
    for (int i = 0; i < p; ++i) row[i] = tall ? A.at(k, i) : A.at(i, k);
    for (int i = 0; i < p; ++i)
      for (int j = 0; j <= i; ++j) G[i * p + j] += row[i] * row[j];
  }
  for (int i = 0; i < p; ++i)
    for (int j = 0; j < i; ++j) G[j * p + i] = G[i * p + j];
}

constexpr int PANEL = 64;  // rows that are converted to double at a time

// Rows r to r + ROWS − 1 of the upper triangle of G plus those of XᵀX, for a panel X.
template <int ROWS, int COLUMNS>
inline void add_tile(const double *X, int rows, int stride, int r, int c, double *G) {
  Lanes sum[ROWS][COLUMNS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) sum[i][j] = at(G + (r + i) * stride)[c + j];
  for (int k = 0; k < rows; ++k) {
    const double *x = X + k * stride;
    Lanes right[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) right[j] = at(x)[c + j];
    for (int i = 0; i < ROWS; ++i) {
      const Lanes left = all_of<Lanes>(x[r + i]);
      for (int j = 0; j < COLUMNS; ++j) sum[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) at(G + (r + i) * stride)[c + j] = sum[i][j];
}

// The same for one matrix, with vectors along the rows.
inline void gram_rows(const Wrapped<double> &A, int stride, double *G, double *panel) {
  const bool tall = A.m >= A.n;
  const int p = tall ? A.n : A.m, q = tall ? A.m : A.n, vectors = stride / WIDTH;
  for (int i = 0; i < p * stride; ++i) G[i] = 0;
  for (int k = 0; k < q; k += PANEL) {
    const int rows = q - k < PANEL ? q - k : PANEL;
    if (tall) {
      for (int i = 0; i < rows; ++i) {
        load_row<double>(A.A + (long)(k + i) * A.n, 0, 1, p, panel + i * stride);
        for (int j = p; j < stride; ++j) panel[i * stride + j] = 0;
      }
    } else {
      for (int j = 0; j < p; ++j)
        for (int i = 0; i < rows; ++i) panel[i * stride + j] = A.A[(long)j * A.n + k + i];
      for (int i = 0; i < rows; ++i)
        for (int j = p; j < stride; ++j) panel[i * stride + j] = 0;
    }
    for (int r = 0; r < p; r += 4) {
      const int height = p - r < 4 ? p - r : 4;
      for (int c = vectors_before(r); c < vectors; c += 2) {
        const bool wide = c + 1 < vectors;
        if (height == 4 && wide) {
          add_tile<4, 2>(panel, rows, stride, r, c, G);
        } else {
          for (int i = 0; i < height; ++i)
            for (int j = 0; j < (wide ? 2 : 1); ++j)
              add_tile<1, 1>(panel, rows, stride, r + i, c + j, G);
        }
      }
    }
  }
  for (int i = 0; i < p; ++i)
    for (int j = 0; j < i; ++j) G[i * stride + j] = G[j * stride + i];
  for (int i = 0; i < p; ++i)
    for (int j = p; j < stride; ++j) G[i * stride + j] = 0;
}

template <class S, class R> inline void gram(const Wrapped<R> &A, int stride, R *G, R *panel) {
  if constexpr (S::along_rows)
    gram_rows(A, stride, G, panel);
  else
    tiny_gram(A, G, panel);
}

}  // namespace
}  // namespace pmaf
