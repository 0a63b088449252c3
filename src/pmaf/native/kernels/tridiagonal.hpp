// Eigenvalues and eigenvectors of symmetric tridiagonal matrices, with certificates.
//
// T has the diagonal d[0..n-1] and e[i] beside d[i] and d[i+1]. Its norm has to be of the order of
// one, so that nothing over- or underflows.
#pragma once

#include "simd.hpp"

namespace pmaf {
namespace {

constexpr double PIVOT = 1e-30;  // the smallest divisor, far below the rounding of T

constexpr int NORMALISED = 8;    // a recurrence is normalised after so many rows

template <class R> struct Tridiagonal {
  int n;
  R *d, *e, *e2;  // e2 holds the squares of e
  R low, high;    // bounds of the spectrum, by Gershgorin
  R unit;         // rounding error of an eigenvalue

  void prepare() {
    const R none = all_of<R>(0);
    low = high = d[0];
    for (int i = 0; i < n; ++i) {
      const R radius = (i > 0 ? size_of(e[i - 1]) : none) + (i + 1 < n ? size_of(e[i]) : none);
      low = smaller(low, d[i] - radius);
      high = larger(high, d[i] + radius);
      // Without a zero, two determinants in a row are not zero.
      if (i + 1 < n) e2[i] = larger(e[i] * e[i], all_of<R>(PIVOT * PIVOT));
    }
    unit = all_of<R>(2 * EPS) * larger(size_of(low), size_of(high)) + all_of<R>(10 * PIVOT);
    low -= unit;
    high += unit;
  }
};

// The logarithmic derivatives of det(xI − T) and how many eigenvalues are above x.
template <class R> struct Evaluation {
  R count, first, second;  // Σ1/(x − λ) and Σ1/(x − λ)², where the λ are the eigenvalues
};

// The determinants of the leading blocks of xI − T follow from one another by a recurrence of three
// terms, and so do their first derivatives and half their second ones. As many eigenvalues are above x
// as there are changes of sign. Every few rows the numbers are divided by a power of two, lest they
// leave the range.
template <class R> inline Evaluation<R> evaluate(const Tridiagonal<R> &t, R x) {
  const R one = all_of<R>(1), none = all_of<R>(0);
  R before = one, p = x - t.d[0], first_before = none, first = one, second_before = none,
    second = none;
  MaskOf<R> negative = p < none;
  Evaluation<R> found{choose(negative, one, none), {}, {}};
  for (int i = 1; i < t.n; ++i) {
    const R factor = x - t.d[i], beside = t.e2[i - 1];
    const R next = factor * p - beside * before;
    const R first_next = factor * first - beside * first_before + p;
    const R second_next = factor * second - beside * second_before + first;
    before = p, first_before = first, second_before = second;
    p = next, first = first_next, second = second_next;
    const MaskOf<R> now = p < none;
    found.count += choose(differ(now, negative), one, none);
    negative = now;
    if (i % NORMALISED == 0) {
      const R scale = one / power_of_two(larger(size_of(p), size_of(before)));
      before *= scale, first_before *= scale, second_before *= scale;
      p *= scale, first *= scale, second *= scale;
    }
  }
  // An eigenvalue that is met counts as one above.
  const MaskOf<R> met = p == none;
  found.count += choose(both(met, negate(differ(negative, before < none))), one, none);
  const R inverse = one / choose(met, all_of<R>(-PIVOT) * before, p);
  found.first = first * inverse;
  found.second = found.first * found.first - all_of<R>(2) * second * inverse;
  return found;
}

// How many of the unknown eigenvalues, of which there are `degree`, are about equally near.
template <class R> inline R multiplicity(const Evaluation<R> &at, R degree) {
  const R one = all_of<R>(1), shift = all_of<R>(0x1.8p52);  // which rounds to a whole number
  const R ratio = at.first * at.first / larger(at.second, all_of<R>(PIVOT)) - all_of<R>(0.3);
  return larger(one, smaller(degree, (smaller(ratio, degree) + shift) - shift));
}

// Where the result may exceed one, without the division, for which the next step would wait.
template <class R> inline MaskOf<R> may_repeat(const Evaluation<R> &at) {
  const R second = larger(at.second, all_of<R>(PIVOT));
  return negate(at.first * at.first <= all_of<R>(1.75) * second);
}

// The number of eigenvalues above x.
template <class R> inline R count_above(const Tridiagonal<R> &t, R x) {
  const R least = all_of<R>(PIVOT), one = all_of<R>(1), none = all_of<R>(0);
  R q = away_from_zero(x - t.d[0], least), count = choose(q < none, one, none);
  for (int i = 1; i < t.n; ++i) {
    q = away_from_zero((x - t.d[i]) - t.e2[i - 1] / q, least);
    count += choose(q < none, one, none);
  }
  return count;
}

// The k largest eigenvalues, descending.
//
// Laguerre's method, started between two zeros of a polynomial with real zeros or outside of all,
// goes monotonically to the next zero, up or down, and converges cubically to a simple one. To divide
// by the zeros that are known leads to the others. Sturm counts at the iterates say in which
// direction the eigenvalue is, and make a bracket: the method ends when that is as narrow as
// rounding, which proves the result. Each step goes too far by `width`, so that at convergence it
// ends on the other side and completes the bracket. Where more unknown eigenvalues are above the
// iterate than the step was meant for, the bracket is bisected.
template <class R> inline void largest_values(const Tridiagonal<R> &t, int k, R *values) {
  const R one = all_of<R>(1), none = all_of<R>(0), half = all_of<R>(0.5);
  const R width = t.unit, narrow = width * all_of<R>(4);
  R high = t.high, x = high;
  for (int j = 0; j < k; ++j) {
    const R degree = all_of<R>(t.n - j);
    const R limit = all_of<R>(j + 0.5);
    R low = t.low, zeros = one;
    MaskOf<R> active = high - low > narrow;
    for (int step = 0; step < 160 && any(active); ++step) {
      Evaluation<R> at = evaluate(t, x);
      for (int i = 0; i < j; ++i) {
        const R inverse = one / away_from_zero(x - values[i], all_of<R>(PIVOT));
        at.first -= inverse;
        at.second -= inverse * inverse;
      }
      const MaskOf<R> above = at.count < limit;
      high = choose(both(active, both(above, x < high)), x, high);
      low = choose(both(active, both(negate(above), x > low)), x, low);
      const MaskOf<R> few = at.count < limit + zeros;
      // Near an eigenvalue of multiplicity r, first²/second is r, and the method for r-fold zeros
      // converges cubically, where the one for simple zeros is linear.
      R ratio = degree - one;
      if (step > 2 && any(may_repeat(at))) {
        zeros = multiplicity(at, degree);
        ratio = (degree - zeros) / zeros;
      } else {
        zeros = one;
      }
      const R square =
          root(larger(ratio * (degree * at.second - at.first * at.first), none));
      const R divisor = choose(above, at.first + square, square - at.first);
      const R move = degree / divisor + width;
      R next = choose(above, x - move, x + move);
      const MaskOf<R> inside = both(both(next > low, next < high), few);
      next = choose(both(inside, divisor > none), next, half * (low + high));
      active = both(active, high - low > narrow);
      x = choose(active, next, x);
    }
    values[j] = half * (low + high);
    // Near a zero that is divided out, the difference would have no digits.
    x = values[j] - all_of<R>(1e-3) * (t.high - t.low);
  }
}

// The eigenvector of `value` by a twisted factorisation (Fernando; Parlett and Dhillon).
//
// Factorisations of λI − T from both ends meet in the row where the pivot γ is smallest. Returns the
// residual |γ|/‖z‖ of the unit vector z, and replaces the value by zᵀTz = λ − γ/‖z‖². `work` holds
// 3n numbers, of which the last n say how much of each row belongs to vectors of the same eigenvalue:
// if that repeats, T falls into blocks, and another block has another vector.
template <class R> inline R eigenvector(const Tridiagonal<R> &t, R &value, R *z, R *work) {
  const int n = t.n;
  const R least = all_of<R>(PIVOT), one = all_of<R>(1), none = all_of<R>(0);
  R *down = work, *up = work + n;  // reciprocals of the pivots
  const R *occupied = work + 2 * n;
  const R trace = all_of<R>(1e-20);
  const auto merit = [&](R pivot, int i) {
    return (size_of(pivot) + trace) / (larger(one - occupied[i], none) + trace);
  };
  R q = away_from_zero(value - t.d[0], least);
  down[0] = one / q;
  for (int i = 1; i < n; ++i) {
    q = away_from_zero((value - t.d[i]) - t.e2[i - 1] * down[i - 1], least);
    down[i] = one / q;
  }
  R best = q, least_merit = merit(q, n - 1), twist = all_of<R>(n - 1);
  q = away_from_zero(value - t.d[n - 1], least);
  up[n - 1] = one / q;
  for (int i = n - 2; i >= 0; --i) {
    const R rest = (value - t.d[i]) - t.e2[i] * up[i + 1];
    const R pivot = i > 0 ? rest - t.e2[i - 1] * down[i - 1] : rest;
    const R found = merit(pivot, i);
    const MaskOf<R> smallest = found < least_merit;
    best = choose(smallest, pivot, best);
    least_merit = choose(smallest, found, least_merit);
    twist = choose(smallest, all_of<R>(i), twist);
    up[i] = one / away_from_zero(rest, least);
  }
  for (int i = 0; i < n; ++i) z[i] = choose(twist == all_of<R>(i), one, none);
  for (int i = n - 2; i >= 0; --i)
    z[i] = choose(all_of<R>(i) < twist, t.e[i] * z[i + 1] * down[i], z[i]);
  for (int i = 1; i < n; ++i)
    z[i] = choose(all_of<R>(i) > twist, t.e[i - 1] * z[i - 1] * up[i], z[i]);
  R square = none;
  for (int i = 0; i < n; ++i) square += z[i] * z[i];
  const R length = root(square), inverse = one / length;
  for (int i = 0; i < n; ++i) z[i] *= inverse;
  value -= best * inverse * inverse;
  return size_of(best) * inverse;
}

// Makes z orthogonal to the first j rows, twice, and a unit vector; false in lanes where it depends on
// them.
template <class R>
inline MaskOf<R> orthogonalise(const R *rows, int j, int n, int stride, R *z) {
  R length = all_of<R>(1);
  MaskOf<R> good = length > all_of<R>(0);
  for (int pass = 0; pass < (j > 0 ? 2 : 1); ++pass) {
    for (int i = 0; i < j; ++i) {
      const R *y = rows + i * stride;
      R along = all_of<R>(0);
      for (int l = 0; l < n; ++l) along += y[l] * z[l];
      for (int l = 0; l < n; ++l) z[l] -= along * y[l];
    }
    R square = all_of<R>(0);
    for (int l = 0; l < n; ++l) square += z[l] * z[l];
    length = root(square);
    if (pass == 0) good = length > all_of<R>(0.7);
    const R inverse = all_of<R>(1) / length;
    for (int l = 0; l < n; ++l) z[l] *= inverse;
  }
  return good;
}

// z ← (λI − T)⁻¹z, by the reciprocals of pivots that `eigenvector` has left.
template <class R> inline void invert(const Tridiagonal<R> &t, const R *down, R *z) {
  for (int i = 1; i < t.n; ++i) z[i] += t.e[i - 1] * down[i - 1] * z[i - 1];
  z[t.n - 1] *= down[t.n - 1];
  for (int i = t.n - 2; i >= 0; --i) z[i] = down[i] * (z[i] + t.e[i] * z[i + 1]);
}

template <class R> inline R residual_of(const Tridiagonal<R> &t, R value, const R *z) {
  R square = all_of<R>(0);
  for (int i = 0; i < t.n; ++i) {
    R rest = (value - t.d[i]) * z[i];
    if (i > 0) rest -= t.e[i - 1] * z[i - 1];
    if (i + 1 < t.n) rest -= t.e[i] * z[i + 1];
    square += rest * rest;
  }
  return root(square);
}

// The k largest eigenpairs; rows z + j·stride. Returns where they have a proof and small residuals.
template <class R>
inline MaskOf<R> largest_pairs(Tridiagonal<R> &t, int k, R *values, R *rows, int stride, R *work) {
  t.prepare();
  largest_values(t, k, values);
  MaskOf<R> good = t.high == t.high;
  const R allowed = all_of<R>(8) * t.unit;
  // If all eigenvalues are equal, rounding of them is the whole range.
  const R close = larger(all_of<R>(1e-6) * (t.high - t.low), allowed);
  for (int j = 0; j < k; ++j) {
    R *occupied = work + 2 * t.n, *z = rows + j * stride;
    for (int l = 0; l < t.n; ++l) occupied[l] = all_of<R>(0);
    for (int i = 0; i < j; ++i) {
      const MaskOf<R> same = values[i] - values[j] <= close;
      const R *y = rows + i * stride;
      if (any(same))
        for (int l = 0; l < t.n; ++l) occupied[l] += choose(same, y[l] * y[l], all_of<R>(0));
    }
    const R residual = eigenvector(t, values[j], z, work);
    MaskOf<R> found = residual <= allowed;
    if (j > 0) found = both(found, orthogonalise(rows, j, t.n, stride, z));
    // Eigenvalues that are close, in a matrix that does not fall into blocks, have given a vector that
    // depends on those before it: inverse iteration finds another.
    // Each starts elsewhere, lest one subspace have to hold them all.
    R *trial = occupied;
    for (int l = 0; l < t.n && any(negate(found)); ++l)
      trial[l] = all_of<R>(0.5 + ((l * 856 + j * 727) % 1009) / 1009.0);
    for (int step = 0; step < 4 && any(negate(found)); ++step) {
      orthogonalise(rows, j, t.n, stride, trial);
      invert(t, work, trial);
      orthogonalise(rows, j, t.n, stride, trial);
      // What was left of a vector that depends on the rows is rounding, and depends on them again.
      const MaskOf<R> apart = orthogonalise(rows, j, t.n, stride, trial);
      for (int l = 0; l < t.n; ++l) z[l] = choose(found, z[l], trial[l]);
      found = either(found, both(apart, residual_of(t, values[j], trial) <= allowed));
    }
    good = both(good, found);
  }
  return good;
}

}  // namespace
}  // namespace pmaf
