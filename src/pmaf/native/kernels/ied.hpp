// The layer IED: largest eigenpairs of symmetric matrices, and their gradients.
//
// Everything is computed in double precision. For matrices of float the results are then exact to
// their last digit, and no code refines them.
#pragma once

#include "api.hpp"
#include "storage.hpp"

namespace pmaf {
namespace {

// Replaces a matrix by its symmetric part: the upper triangle, and the vectors on the diagonal.
// Returns its largest entry.
inline double symmetrise_rows(double *a, int n, int stride) {
  Lanes largest = all_of<Lanes>(0);
  const Lanes half = all_of<Lanes>(0.5);
  for (int r = 0; r < n; r += WIDTH)
    for (int c = r; c < n; c += WIDTH) {
      alignas(64) double turned[WIDTH][WIDTH];
      for (int y = 0; y < WIDTH; ++y)
        for (int x = 0; x < WIDTH; ++x) turned[x][y] = c + y < n ? a[(c + y) * stride + r + x] : 0;
      for (int x = 0; x < WIDTH && r + x < n; ++x) {
        Lanes &row = *at(a + (r + x) * stride + c);
        row = half * row + half * *at(turned[x]);
        largest = larger(largest, size_of(row));
      }
    }
  double most = 0;
  for (int l = 0; l < WIDTH; ++l) most = largest[l] > most ? largest[l] : most;
  return most;
}

template <class R> inline R symmetrise(R *a, int n) {
  R largest = all_of<R>(0);
  const R half = all_of<R>(0.5);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) {
      const R s = half * a[i * n + j] + half * a[j * n + i];
      a[i * n + j] = a[j * n + i] = s;
      largest = larger(largest, size_of(s));
    }
  return largest;
}

// Loads ½(A + Aᵀ)/unit of each matrix, and returns the powers of two by which it was divided.
template <class S, class F>
inline typename S::Number load(const F *A, int n, int filled, double sign,
                               typename S::Number *a) {
  using R = typename S::Number;
  constexpr int lanes = Kind<R>::lanes;
  const int stride = S::stride_of(n);
  for (int l = 0; l < lanes; ++l) {
    const F *x = A + (long)(l < filled ? l : 0) * n * n;
    double *to = (double *)a + l;
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) to[(i * stride + j) * lanes] = x[i * n + j];
      for (int j = n; j < stride; ++j) to[(i * stride + j) * lanes] = 0;
    }
  }
  R largest, unit, scale;
  if constexpr (S::along_rows)
    largest = symmetrise_rows(a, n, stride);
  else
    largest = symmetrise(a, n);
  for (int l = 0; l < lanes; ++l) {
    const double power = power_of_two(get(largest, l));
    put(unit, l, power);
    put(scale, l, sign / power);
  }
  if constexpr (S::along_rows) {
    const Lanes factor = all_of<Lanes>(scale);
    for (int i = 0; i < n; ++i)
      for (int c = vectors_before(i); c < stride / WIDTH; ++c) at(a + i * stride)[c] *= factor;
  } else {
    for (int i = 0; i < n * n; ++i) a[i] *= scale;
  }
  return unit;
}

template <class S> inline long forward_space(int n, int k) {
  const long stride = S::stride_of(n);
  return stride * n + 10 * stride + k * stride + k + 16;
}

template <class S, class F>
inline long find_pairs(const Forward &p, long first, int filled, typename S::Number *space) {
  using R = typename S::Number;
  constexpr int lanes = Kind<R>::lanes;
  const int n = p.n, k = p.k, stride = S::stride_of(n);
  R *a = space, *d = a + (long)stride * n, *e = d + stride, *e2 = e + stride, *tau = e2 + stride,
    *work = tau + stride, *rows = work + 5 * stride, *values = rows + k * stride;
  const F *A = (const F *)p.A + first * n * n;
  const R unit = load<S, F>(A, n, filled, p.sign, a);
  S::reduce(a, n, stride, d, e, tau, work);
  Tridiagonal<R> t{n, d, e, e2, {}, {}, {}};
  const MaskOf<R> good = largest_pairs(t, k, values, rows, stride, work);
  for (int j = 0; j < k; ++j) {
    R *z = rows + j * stride;
    for (int i = n; i < stride; ++i) z[i] = all_of<R>(0);
    S::turn_back(a, n, stride, tau, z);
    const R sign = sign_of(z, n, p.second, p.tolerance);
    values[j] = choose(size_of(values[j]) < all_of<R>(16 * PIVOT), all_of<R>(0), values[j]);
    values[j] *= unit * all_of<R>(p.sign);
    const Place place(j, k, n, p.columns);
    F *value = (F *)p.values + first * k + j;
    F *vector = (F *)p.vectors + first * k * n + place.start;
    for (int l = 0; l < lanes && l < filled; ++l) {
      value[l * k] = (F)get(values[j], l);
      F *to = vector + (long)l * k * n;
      const double s = get(sign, l);
      for (int i = 0; i < n; ++i)
        to[i * place.stride] = (F)(s * ((const double *)z)[i * lanes + l]);
    }
  }
  long many = 0;
  for (int l = 0; l < lanes && l < filled; ++l) {
    const bool bad = !is_set(good, l);
    if (p.failed) p.failed[first + l] = bad;
    many += bad;
  }
  return many;
}

// So many vectors of a repeated eigenvalue are found one by one; beyond, a decomposition is faster.
constexpr int NULLS = 8;

template <class S> inline long backward_space(int n, int k, int rows) {
  const long stride = S::stride_of(n);
  return 2 * stride * n + 6 * stride + (k + rows + NULLS) * stride + 2 * (k + rows) + k * k + 16;
}

// A lower bound of the spectral norm: of tiny matrices from the Frobenius norm, which exceeds it by
// at most √n, of others from products with a vector without structure. `image` holds 2·stride numbers.
template <class S>
inline typename S::Number norm_of(const typename S::Number *a, int n, typename S::Number *probe,
                                  typename S::Number *image) {
  using R = typename S::Number;
  const int stride = S::stride_of(n);
  const R one = all_of<R>(1), least = all_of<R>(1e-200);
  if constexpr (!S::along_rows) {
    return larger(root(dot(a, a, n * n) * all_of<R>(1.0 / n)), least);
  } else {
    R scale = least;
    for (int i = 0; i < n; ++i) probe[i] = all_of<R>(1 + 0.5 * ((i * 7919) % 13 - 6.0) / 6);
    for (int step = 0; step < 2; ++step) {
      const R length = one / root(dot(probe, probe, n));
      for (int i = 0; i < n; ++i) probe[i] *= length;
      S::product(a, n, stride, probe, image);
      scale = larger(scale, root(dot(image, image, n)));
      for (int i = 0; i < n; ++i) probe[i] = image[i] + least;
    }
    return scale;
  }
}

// Solves (λI − S)z = v for each row, where z is orthogonal to the rows of y, by Cholesky's
// factorisation of λI − S + YᵀDY, in which D makes the matrix as large along y as it is elsewhere.
// For a gradient, the part of z along the other vectors follows in closed form.
template <class S, class F>
inline long solve_complement(const Backward &p, long first, int filled,
                             typename S::Number *space) {
  using R = typename S::Number;
  constexpr int lanes = Kind<R>::lanes;
  const int n = p.n, k = p.k, rows = p.rows, stride = S::stride_of(n);
  R *a = space, *K = a + (long)stride * n, *inverse = K + (long)stride * n,
    *image = inverse + stride, *probe = image + 2 * stride, *again = probe + stride, *right = again + stride,
    *y = right + stride, *z = y + k * stride, *values = z + rows * stride, *shifts = values + k;
  const R one = all_of<R>(1), none = all_of<R>(0);
  const F *A = (const F *)p.A + first * n * n;
  const R unit = load<S, F>(A, n, filled, p.sign, a);
  for (int i = 0; i < (k + rows + 6) * stride; ++i) inverse[i] = none;
  for (int j = 0; j < k; ++j) {
    const Place place(j, k, n, p.columns);
    const F *from = (const F *)p.y + first * k * n + place.start;
    load_row<R, F>(from, (long)k * n, filled, n, y + j * stride, place.stride);
  }
  // The rows have been rounded: in double precision they are normalised again.
  for (int j = 0; j < k; ++j) {
    R *row = y + j * stride;
    for (int i = 0; i < j; ++i) add(row, -dot(row, y + i * stride, n), y + i * stride, n);
    const R length = one / root(dot(row, row, n));
    for (int i = 0; i < n; ++i) row[i] *= length;
    S::product(a, n, stride, row, image);
    values[j] = dot(image, row, n);
  }
  R scale = norm_of<S>(a, n, probe, image);
  for (int j = 0; j < k; ++j) scale = larger(scale, size_of(values[j]));
  const R equal = all_of<R>(p.equal) * scale;
  MaskOf<R> good = scale == scale;
  for (int j = 0; j < rows; ++j) {
    R *row = z + j * stride;
    if (p.shift) {
      // The shift is a rounded eigenvalue of one of the rows of y.
      load_row<R, F>((const F *)p.shift + first * rows + j, rows, filled, 1, shifts + j);
      const R given = all_of<R>(p.sign) * shifts[j] / unit;
      R nearest = values[0];
      for (int i = 1; i < k; ++i)
        nearest = choose(size_of(values[i] - given) < size_of(nearest - given), values[i], nearest);
      shifts[j] = nearest;
    } else {
      shifts[j] = values[j];
    }
    if (!p.v) continue;
    const Place place(j, rows, n, p.columns);
    const F *from = (const F *)p.v + first * rows * n + place.start;
    load_row<R, F>(from, (long)rows * n, filled, n, row, place.stride);
  }
  // For a gradient, z has a part along the other vectors, in closed form. The symmetric part of the
  // products of v and y does not matter, and a difference below rounding of v counts as zero: for a
  // function of the span it is zero, and two eigenvalues may be close.
  const bool coupled = p.v && !p.shift && k > 1;
  R *inside = shifts + rows + NULLS * stride;
  // The lengths of v, in units in which no square overflows, wait on the diagonal.
  for (int j = 0; j < k && coupled; ++j) {
    const R *v = z + j * stride;
    R most = all_of<R>(1e-300), square = none;
    for (int i = 0; i < n; ++i) most = larger(most, size_of(v[i]));
    for (int i = 0; i < n; ++i) square += (v[i] / most) * (v[i] / most);
    inside[j * k + j] = most * root(square);
  }
  for (int j = 0; j < k && coupled; ++j)
    for (int i = 0; i < j; ++i) {
      const R rise = values[j] - values[i], half = all_of<R>(0.5);
      const R turn = half * dot(z + j * stride, y + i * stride, n) -
                     half * dot(z + i * stride, y + j * stride, n);
      const R length = larger(inside[i * k + i], inside[j * k + j]);
      const MaskOf<R> known =
          both(size_of(rise) > equal, size_of(turn) > all_of<R>(p.equal) * length);
      inside[i * k + j] = inside[j * k + i] =
          choose(known, turn / choose(rise == none, one, rise), none);
    }
  for (int j = 0; j < k && coupled; ++j) inside[j * k + j] = none;
  // λI − S plus what makes it as large along y as it is elsewhere.
  int nulls = 0;
  R *null = shifts + rows;
  const auto factor = [&](R shift) {
    for (int r = 0; r < n; ++r) {
      R *row = K + r * stride;
      for (int c = 0; c < stride; ++c) row[c] = -a[r * stride + c];
      row[r] += shift;
      for (int i = 0; i < k; ++i)
        add(row, (scale - (shift - values[i])) * y[i * stride + r], y + i * stride, n);
    }
    S::factor(K, n, stride, inverse, all_of<R>(EPS) * scale);
  };
  const auto clear = [&](R *x) {
    for (int i = 0; i < k; ++i) orthogonal_to(x, y + i * stride, n);
    for (int i = 0; i < nulls; ++i) orthogonal_to(x, null + i * stride, n);
  };
  for (int j = 0; j < rows && p.v; ++j) {
    bool fresh = j == 0;
    for (int l = 0; l < lanes && !fresh; ++l) fresh = get(shifts[j], l) != get(shifts[j - 1], l);
    if (fresh) {
      nulls = 0;
      factor(shifts[j]);
    }
    R *row = z + j * stride;
    clear(row);
    for (int i = 0; i < n; ++i) right[i] = row[i];
    for (;;) {
      clear(row);
      S::solve(K, n, stride, inverse, row);
      clear(row);
      // ‖K⁻¹z‖/‖z‖ is a lower bound of 1/gap, close to it where a small gap matters. If the gap is
      // rounding, K⁻¹z is a null vector: there is no derivative along it, and z gets no part along it.
      // It is one of the computed factors, too, so that they serve for its complement.
      for (int i = 0; i < n; ++i) again[i] = row[i];
      S::solve(K, n, stride, inverse, again);
      clear(again);
      const R growth = dot(again, again, n), size = dot(row, row, n);
      const MaskOf<R> singular = negate(growth * equal * equal <= size);
      if (!any(singular)) break;
      if (nulls == NULLS) {
        good = both(good, negate(singular));
        break;
      }
      const R length = choose(singular, one / root(growth), none);
      R *next = null + nulls * stride;
      for (int i = 0; i < n; ++i) next[i] = again[i] * length;
      for (int i = n; i < stride; ++i) next[i] = none;
      ++nulls;
      for (int i = 0; i < n; ++i) row[i] = right[i];
    }
    for (int i = 0; i < k && coupled; ++i) add(row, inside[i * k + j], y + i * stride, n);
  }
  long many = 0;
  for (int l = 0; l < lanes && l < filled; ++l) {
    const bool bad = !is_set(good, l);
    if (p.failed) p.failed[first + l] = bad;
    many += bad;
  }
  const R back = p.v ? all_of<R>(p.sign) / unit : one;
  if (p.shift) {
    for (int j = 0; j < rows; ++j)
      for (int l = 0; l < lanes && l < filled; ++l) {
        F *to = (F *)p.result + ((first + l) * rows + j) * n;
        const double factor = get(back, l);
        for (int i = 0; i < n; ++i)
          to[i] = (F)(factor * ((const double *)(z + j * stride))[i * lanes + l]);
      }
    return many;
  }
  for (int j = 0; j < k; ++j) {
    R *row = z + j * stride;
    for (int i = 0; i < n; ++i) row[i] *= all_of<R>(0.5) * back;
    if (p.d_values) {
      R along;
      load_row<R, F>((const F *)p.d_values + first * k + j, k, filled, 1, &along);
      add(row, all_of<R>(0.5) * along, y + j * stride, n);
    }
  }
  for (int r = 0; r < n; ++r) {
    for (int c = 0; c < n; ++c) image[c] = none;
    for (int j = 0; j < k; ++j) {
      add(image, z[j * stride + r], y + j * stride, n);
      add(image, y[j * stride + r], z + j * stride, n);
    }
    for (int l = 0; l < lanes && l < filled; ++l) {
      F *to = (F *)p.result + ((first + l) * n + r) * n;
      for (int c = 0; c < n; ++c) to[c] = (F)((const double *)image)[c * lanes + l];
    }
  }
  return many;
}

}  // namespace
}  // namespace pmaf
