// The layer IED: largest eigenpairs of symmetric and Hermitian matrices, and of pairs of them, and
// their gradients.
//
// Everything is computed in double precision. For matrices of float the results are then exact to
// their last digit, and no code refines them.
#pragma once

#include "api.hpp"
#include "arena.hpp"
#include "reduction.hpp"
#include "storage.hpp"

namespace pmaf {
namespace {

// Replaces a matrix by its Hermitian part, times a sign: the upper triangle, and the vectors on the
// diagonal. Returns its largest part of an entry.
template <class E> inline double symmetrise_rows(double *a, int n, int stride, double sign) {
  using V = Vector<E>;
  Lanes largest = all_of<Lanes>(0);
  const Lanes half = all_of<Lanes>(0.5 * sign);
  for (int r = 0; r < n; r += WIDTH)
    for (int c = r; c < n; c += WIDTH) {
      V turned[WIDTH];
      turn_block<E>(a, n, stride, c, r, turned);
      for (int x = 0; x < WIDTH && r + x < n; ++x) {
        V &row = at<E>(a + (r + x) * stride)[c / WIDTH];
        row = row * half + turned[x] * half;
        largest = larger(largest, largest_part(row));
      }
    }
  double most = 0;
  for (int l = 0; l < WIDTH; ++l) most = largest[l] > most ? largest[l] : most;
  return most;
}

template <class X> inline RealOf<X> symmetrise(X *a, int n, double sign) {
  using R = RealOf<X>;
  R largest = all_of<R>(0);
  const R half = all_of<R>(0.5 * sign);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) {
      const X s = a[i * n + j] * half + conjugate(a[j * n + i]) * half;
      a[i * n + j] = s;
      a[j * n + i] = conjugate(s);
      largest = larger(largest, largest_part(s));
    }
  return largest;
}

// Divides matrices, of which `largest` is the largest entry, by powers of two, which are returned.
template <class S>
inline typename S::Number divide(typename S::Number *a, int n, typename S::Number largest) {
  using R = typename S::Number;
  const int stride = S::stride_of(n);
  const R unit = power_of_two(largest), scale = all_of<R>(1) / unit;
  if constexpr (S::along_rows) {
    const Lanes factor = all_of<Lanes>(scale);
    for (int i = 0; i < n; ++i)
      for (int c = vectors_before(i) * S::parts; c < stride / WIDTH; ++c)
        at(a + i * stride)[c] *= factor;
  } else {
    for (int i = 0; i < n * stride; ++i) a[i] *= scale;
  }
  return unit;
}

// Loads ±½(A + Aᴴ)/unit of each matrix, and returns the powers of two by which it was divided: ones
// without DIVIDED.
template <class S, bool DIVIDED = true>
inline typename S::Number load(Source A, int n, int filled, double sign, typename S::Number *a) {
  using R = typename S::Number;
  R largest;
  if constexpr (S::along_rows) {
    const int stride = S::stride_of(n);
    for (int i = 0; i < n; ++i) {
      R *row = a + i * stride;
      for (int j = vectors_before(n) * WIDTH * S::parts; j < stride; ++j) row[j] = 0;  // at the end
      load_entries<S>(A + (long)i * n * S::parts, 0, 1, n, row);
    }
    largest = symmetrise_rows<typename S::Entry>(a, n, stride, sign);
  } else {
    load_entries<S>(A, (long)n * n, filled, n * n, a);
    largest = symmetrise((typename S::Entry *)a, n, sign);
  }
  return DIVIDED ? divide<S>(a, n, largest) : all_of<R>(1);
}

// Reduces a pair to C = T⁻¹AT⁻ᴴ, and returns the unit of C. `lower` and `spare` hold as many numbers
// as `a`, `work` holds 5·stride.
template <class S>
inline typename S::Number reduce_pair(const Forward &p, long first, int filled,
                                      typename S::Number unit, typename S::Number *a,
                                      typename S::Number *lower, typename S::Number *spare,
                                      typename S::Number *inverse, typename S::Number *work,
                                      MaskOf<typename S::Number> &good) {
  using R = typename S::Number;
  constexpr int lanes = Kind<R>::lanes;
  const int n = p.n, stride = S::stride_of(n);
  const R one = all_of<R>(1), none = all_of<R>(0);
  const Source M = Source(p.M, p.kind) + first * n * n * S::parts;
  const R metric = load<S>(M, n, filled, 1, lower);
  R *diagonal = work;
  for (int i = 0; i < n; ++i) diagonal[i] = real_part(S::entry(lower + i * stride, i));
  for (int i = 0; i < stride; ++i) inverse[i] = none;
  good = both(S::factor(lower, n, stride, inverse, all_of<R>(EPS * EPS)), metric == metric);
  for (int i = 0; i < n; ++i) {
    const MaskOf<R> far = inverse[i] * diagonal[i] * all_of<R>(p.definite) < one;
    good = both(good, far);
    inverse[i] = choose(good, inverse[i], one);  // the entry is solved by another way
  }
  S::congruent(lower, n, stride, inverse, a, spare, work);
  R largest = none;
  for (int i = 0; i < n; ++i)
    for (int j = i; j < n; ++j)
      largest = larger(largest, largest_part(S::entry(a + i * stride, j)));
  const R again = divide<S>(a, n, largest), all = unit * again / metric;
  for (int i = 0; i < n; ++i) inverse[i] /= metric;
  if (!p.matrix) return all;
  for (int i = 0; i < n; ++i)
    for (int j = i; j < n; ++j)
      for (int part = 0; part < S::parts; ++part) {
        const R c = a[i * stride + S::place(j, part)] * all * all_of<R>(p.sign);
        const R f = i == j ? inverse[i] : lower[S::place_in_factor(n, stride, j, i, part)];
        for (int l = 0; l < lanes && l < filled; ++l) {
          const long start = (first + l) * n * n;
          p.matrix[(start + (long)i * n + j) * S::parts + part] = get(c, l);
          p.matrix[(start + (long)j * n + i) * S::parts + part] = part ? -get(c, l) : get(c, l);
          p.factor[(start + (long)i * n + j) * S::parts + part] = get(f, l);
        }
      }
  return all;
}

// Loads the factor that `reduce_pair` has stored.
template <class S>
inline void load_factor(const double *from, int n, int filled, typename S::Number *lower,
                        typename S::Number *inverse) {
  using R = typename S::Number;
  constexpr int lanes = Kind<R>::lanes;
  const int stride = S::stride_of(n);
  for (int i = 0; i < n * stride; ++i) lower[i] = all_of<R>(0);
  for (int l = 0; l < lanes; ++l) {
    const double *x = from + (long)(l < filled ? l : 0) * n * n * S::parts;
    for (int i = 0; i < n; ++i) {
      ((double *)inverse)[i * lanes + l] = x[(i * n + i) * S::parts];
      for (int j = i + 1; j < n; ++j)
        for (int part = 0; part < S::parts; ++part)
          ((double *)lower)[S::place_in_factor(n, stride, j, i, part) * lanes + l] =
              x[(i * n + j) * S::parts + part];
    }
  }
}

// x ← T⁻¹x, or x ← T⁻ᴴx.
template <class S>
inline void divide_by_root(const typename S::Number *inverse, int n, typename S::Number *x) {
  for (int i = 0; i < n; ++i)
    for (int part = 0; part < S::parts; ++part) x[S::place(i, part)] *= root(inverse[i]);
}
template <class S>
inline void forth(const typename S::Number *lower, const typename S::Number *inverse, int n,
                  typename S::Number *x) {
  S::solve_lower(lower, n, S::stride_of(n), x);
  divide_by_root<S>(inverse, n, x);
}
template <class S>
inline void back(const typename S::Number *lower, const typename S::Number *inverse, int n,
                 typename S::Number *x) {
  divide_by_root<S>(inverse, n, x);
  S::solve_upper(lower, n, S::stride_of(n), x);
}

template <class S> inline typename S::Number square(const typename S::Number *x, int n) {
  return dot(x, x, S::stride_of(n));
}
template <class S>
inline void scale(typename S::Number *x, typename S::Number factor, int n) {
  for (int i = 0; i < S::stride_of(n); ++i) x[i] *= factor;
}

// The sum of the entries.
template <class S> inline typename S::Entry sum_of(const typename S::Number *x, int n) {
  typename S::Entry sum = S::entry(x, 0);
  for (int i = 1; i < n; ++i) sum += S::entry(x, i);
  return sum;
}

// Multiplies a vector by the sign, or by the phase, that makes the sum of its entries positive. Where
// that is zero, a second product decides the sign; the phase is not decided, and not good. Returns the
// sign of a real vector.
template <class S>
inline typename S::Number orient(const Forward &p, typename S::Number length, typename S::Number *z,
                   MaskOf<typename S::Number> &good, typename S::Number *x) {
  using R = typename S::Number;
  const int n = p.n;
  const R tolerance = all_of<R>(p.tolerance) * length;
  if constexpr (S::parts == 1) {
    const R sign = sign_of(z, n, p.second, tolerance);
    scale<S>(z, sign, n);
    if (x) scale<S>(x, sign, n);
    return sign;
  } else {
    const typename S::Entry sum = sum_of<S>(z, n);
    const R size = root(square_of(sum));
    good = both(good, size > tolerance);
    const typename S::Entry phase = conjugate(sum) / choose(size > tolerance, size, all_of<R>(1));
    const auto turn = [&](R *vector) {
      for (int i = 0; i < n; ++i) {
        const typename S::Entry turned = S::entry(vector, i) * phase;
        vector[S::place(i, 0)] = turned.re;
        vector[S::place(i, 1)] = turned.im;
      }
    };
    turn(z);
    if (x) turn(x);
    return all_of<R>(1);
  }
}

// Whether a number, rounded to the precision of a kind, is finite.
template <class R> inline MaskOf<R> fits(R x, int kind) {
  const double most = kind % 2 ? 1.7976931348623157e308 : 3.4028235e38;
  return size_of(x) <= all_of<R>(most);
}

// The Frobenius norm, by the upper triangle.
template <class S> inline typename S::Number frobenius(const typename S::Number *a, int n) {
  typename S::Number sum = all_of<typename S::Number>(0);
  for (int i = 0; i < n; ++i)
    for (int j = i; j < n; ++j)
      sum += square_of(S::entry(a + i * S::stride_of(n), j)) *
             all_of<typename S::Number>(i == j ? 1 : 2);
  return root(sum);
}

// Where the residuals of the eigenpairs of A and M that have been stored are rounding. The factor of M
// multiplies rounding errors by the condition of M. `a` and `m` hold a matrix each, `y` a vector, and
// `work` four.
template <class S>
inline MaskOf<typename S::Number> are_accurate(const Forward &p, long first, int filled,
                                               typename S::Number *a, typename S::Number *m,
                                               typename S::Number *y, typename S::Number *work) {
  using R = typename S::Number;
  const int n = p.n, k = p.k, stride = S::stride_of(n);
  const long start = first * n * n * S::parts;
  const R unit = load<S>(Source(p.A, p.kind) + start, n, filled, 1, a),
          metric = load<S>(Source(p.M, p.kind) + start, n, filled, 1, m),
          size = frobenius<S>(a, n), mass = frobenius<S>(m, n);
  R *image = work, *dual = work + 2 * stride;
  MaskOf<R> good = size == size;
  for (int i = 0; i < stride; ++i) y[i] = all_of<R>(0);
  for (int j = 0; j < k; ++j) {
    R value;
    load_row(Source(p.values, p.kind) + (first * k + j), k, filled, 1, &value);
    const long from = (first * k + j) * n * S::parts;
    load_entries<S>(Source(p.vectors, p.kind) + from, (long)k * n, filled, n, y);
    value = value / unit * metric;
    S::product(a, n, stride, y, image);
    S::product(m, n, stride, y, dual);
    for (int i = 0; i < stride; ++i) image[i] -= value * dual[i];
    const R most = all_of<R>(p.refined) * (size + size_of(value) * mass) * root(square<S>(y, n));
    good = both(good, root(square<S>(image, n)) <= most);
  }
  return good;
}

inline Reduction kept_of(const Forward &p, long entry) {
  return {p.n, p.k, p.reduction + entry * Reduction::numbers(p.n, p.k)};
}

// Divides tridiagonal matrices by powers of two, which are returned; not good where a number is not
// finite.
template <class R> inline R normalise(int n, R *d, R *e, MaskOf<R> &good) {
  R largest = size_of(d[n - 1]), sum = largest;
  for (int i = 0; i + 1 < n; ++i) {
    largest = larger(largest, larger(size_of(d[i]), size_of(e[i])));
    sum += size_of(d[i]) + size_of(e[i]);
  }
  good = both(good, sum - sum == all_of<R>(0));
  const R unit = power_of_two(largest), scale = all_of<R>(1) / unit;
  for (int i = 0; i < n; ++i) d[i] *= scale;
  for (int i = 0; i + 1 < n; ++i) e[i] *= scale;
  return unit;
}

// Tridiagonal matrices are solved in the lanes of vectors, whether the matrices were reduced there or
// one after the other.
template <class S>
using Tridiagonals = std::conditional_t<S::along_rows, Lanes, typename S::Number>;
template <class S>
constexpr int PER_NUMBER = Kind<Tridiagonals<S>>::lanes / Kind<typename S::Number>::lanes;

// The memory of `find_pairs`, for matrices in `slots`.
template <class S> struct PairsMemory {
  using R = typename S::Number;
  using Q = Tridiagonals<S>;
  R *matrices, *taus;       // of each slot
  R *lower, *spare;         // of a pair
  R *d, *e, *inverse, *z, *x;
  R *work;                  // five rows
  Q *diagonals, *beside, *squares, *rows, *values;
  Q *spares;                // three rows

  PairsMemory(Arena &arena, int n, int k, bool pair, int slots) {
    const long stride = S::stride_of(n), square = n * stride;
    matrices = arena.take<R>(slots * square);
    taus = arena.take<R>(slots * stride);
    lower = arena.take<R>(pair ? square : 0);
    spare = arena.take<R>(pair ? square : 0);
    for (R **row : {&d, &e, &inverse, &z, &x}) *row = arena.take<R>(stride);
    work = arena.take<R>(5 * stride);
    for (Q **row : {&diagonals, &beside, &squares}) *row = arena.take<Q>(n);
    rows = arena.take<Q>((long)k * n);
    values = arena.take<Q>(k);
    spares = arena.take<Q>(3L * n);
  }
};

// Finds the eigenpairs of `filled` matrices: in the lanes of S, or one after the other in `filled`
// slots, of which a pair has one.
template <class S>
inline long find_pairs(const Forward &p, long first, int filled, Arena arena) {
  using R = typename S::Number;
  using Q = Tridiagonals<S>;
  constexpr int width = Kind<Q>::lanes;
  const int n = p.n, k = p.k, stride = S::stride_of(n), slots = S::along_rows ? filled : 1;
  const int each = S::along_rows ? 1 : filled;  // matrices of a slot
  const bool pair = p.M;
  const PairsMemory<S> memory(arena, n, k, pair, slots);
  const auto [matrices, taus, lower, spare, d, e, inverse, z, x, work, diagonals, beside, squares,
              rows, values, spares] = memory;
  R units[width];
  MaskOf<R> good[width];
  for (int slot = 0; slot < slots; ++slot) {
    R *a = matrices + (long)slot * stride * n;
    const Source A = Source(p.A, p.kind) + (first + slot) * n * n * S::parts;
    R unit = all_of<R>(1), *tau = taus + slot * stride;
    good[slot] = unit == unit;
    if (pair) {
      unit = load<S>(A, n, each, p.sign, a);
      unit = reduce_pair<S>(p, first, each, unit, a, lower, spare, inverse, work, good[slot]);
    } else {
      unit = A.single ? load<S, false>(A, n, each, p.sign, a) : load<S>(A, n, each, p.sign, a);
    }
    S::reduce(a, n, stride, d, e, tau, work);
    const R again = normalise(n, d, e, good[slot]);
    units[slot] = unit * again;
    if constexpr (std::is_same_v<S, Medium>)
      if (p.reduction) kept_of(p, first + slot).store(a, tau, d, e);
    for (int i = 0; i < n; ++i)
      for (int l = slot; l < (slot ? slot + 1 : PER_NUMBER<S>); ++l) {  // unused lanes repeat the first
        ((R *)(diagonals + i))[l] = d[i];
        if (i + 1 < n) ((R *)(beside + i))[l] = e[i];
      }
  }
  Tridiagonal<Q> t{n, diagonals, beside, squares, {}, {}, {}};
  const MaskOf<Q> proved = largest_pairs(t, k, values, rows, n, spares);
  long failed = 0;
  for (int slot = 0; slot < slots; ++slot) {
    R *a = matrices + (long)slot * stride * n;
    const long entry = first + slot;
    if constexpr (S::along_rows)
      good[slot] = good[slot] && is_set(proved, slot);
    else
      good[slot] = both(good[slot], proved);
    for (int j = 0; j < k; ++j) {
      for (int i = 0; i < stride; ++i) z[i] = all_of<R>(0);
      for (int i = 0; i < n; ++i) z[S::place(i, 0)] = ((R *)(rows + j * n + i))[slot];
      S::turn_back(a, n, stride, taus + slot * stride, z);
      R length = all_of<R>(1), value = ((R *)(values + j))[slot];
      if (pair) {
        for (int i = 0; i < stride; ++i) x[i] = z[i];
        back<S>(lower, inverse, n, z);
        length = root(square<S>(z, n));
        good[slot] = both(good[slot], fits(length, p.kind));
      }
      [[maybe_unused]] const R sign = orient<S>(p, length, z, good[slot], pair ? x : nullptr);
      if constexpr (std::is_same_v<S, Medium>)
        if (p.reduction) {
          const Reduction kept = kept_of(p, entry);
          for (int i = 0; i < stride; ++i)
            kept.row(j)[i] = i < n ? sign * ((R *)(rows + j * n + i))[slot] : 0;
          kept.values()[j] = value;
          kept.unit() = units[slot];
        }
      value = choose(size_of(value) < all_of<R>(16 * PIVOT), all_of<R>(0), value);
      value *= units[slot] * all_of<R>(p.sign);
      if (pair) good[slot] = both(good[slot], fits(value, p.kind));
      store_row(&value, all_of<R>(1), k, each, 1, Target(p.values, p.kind) + (entry * k + j));
      const long start = (entry * k + j) * n * S::parts, step = (long)k * n;
      store_entries<S>(z, all_of<R>(1), step, each, n, Target(p.vectors, p.kind) + start);
      if (p.x) store_entries<S>(x, all_of<R>(1), step, each, n, Target(p.x + start, DOUBLE));
    }
    // Beside the rounding of numbers of single precision, those errors are nothing.
    if (pair && p.kind % 2)
      good[slot] = both(good[slot], are_accurate<S>(p, first, each, a, lower, z, work));
    failed += report<R>(good[slot], entry, each, p.failed);
  }
  return failed;
}

// So many vectors of a repeated eigenvalue are found one by one; beyond, a decomposition is faster.
constexpr int NULLS = 8;
// The residual that a solution may have, in rounding errors of the matrix times the solution.
constexpr double RESIDUAL = 16;

// The memory of `solve_complement`.
template <class S> struct ComplementMemory {
  using R = typename S::Number;
  using X = typename S::Entry;
  R *a, *K, *lower;  // matrices, the last one of a pair
  R *inverse, *roots, *probe, *again, *right;
  R *image;          // two rows
  R *y, *z, *null;   // rows
  R *values, *shifts;
  X *inside, *normal;

  ComplementMemory(Arena &arena, int n, int k, int rows, bool pair) {
    const long stride = S::stride_of(n), square = n * stride;
    a = arena.take<R>(square);
    K = arena.take<R>(square);
    lower = arena.take<R>(pair ? square : 0);
    for (R **row : {&inverse, &roots, &probe, &again, &right}) *row = arena.take<R>(stride);
    image = arena.take<R>(2 * stride);
    y = arena.take<R>(k * stride);
    z = arena.take<R>(rows * stride);
    null = arena.take<R>(NULLS * stride);
    values = arena.take<R>(k);
    shifts = arena.take<R>(rows);
    inside = arena.take<X>((long)k * k);
    normal = arena.take<X>((long)k * k);
  }
};

// A lower bound of the spectral norm: of tiny matrices from the Frobenius norm, which exceeds it by
// at most √n, of others from products with a vector without structure; one for a matrix of zeros.
// `image` holds 2·stride numbers.
template <class S>
inline typename S::Number norm_of(const typename S::Number *a, int n, typename S::Number *probe,
                                  typename S::Number *image) {
  using R = typename S::Number;
  const int stride = S::stride_of(n);
  const R one = all_of<R>(1), none = all_of<R>(0);
  R size = none;
  if constexpr (!S::along_rows) {
    // Row by row, so that no sum waits for another.
    for (int i = 0; i < n; ++i) size += dot(a + i * stride, a + i * stride, stride);
    size = root(size * all_of<R>(1.0 / n));
  } else {
    for (int i = 0; i < n; ++i) probe[S::place(i, 0)] = 1 + 0.5 * ((i * 7919) % 13 - 6.0) / 6;
    for (int step = 0; step < 2; ++step) {
      scale<S>(probe, one / root(square<S>(probe, n)), n);
      S::product(a, n, stride, probe, image);
      size = larger(size, root(square<S>(image, n)));
      for (int i = 0; i < n; ++i)
        for (int part = 0; part < S::parts; ++part)
          probe[S::place(i, part)] = image[S::place(i, part)] + 1e-200;
    }
  }
  return choose(size == none, one, size);
}

// Row r of Σ zyᴴ + yzᴴ, over the rows of z and y.
template <class S>
inline void row_of_product(int r, int n, int k, const typename S::Number *z,
                           const typename S::Number *y, typename S::Number *image) {
  using R = typename S::Number;
  const int stride = S::stride_of(n);
  for (int i = 0; i < stride; ++i) image[i] = all_of<R>(0);
  for (int j = 0; j < k; ++j) {
    S::add(image, conjugate(S::entry(z + j * stride, r)), y + j * stride, n);
    S::add(image, conjugate(S::entry(y + j * stride, r)), z + j * stride, n);
  }
  // So far it is the conjugate.
  if constexpr (S::parts == 2)
    for (int i = 0; i < n; ++i) image[S::place(i, 1)] = -image[S::place(i, 1)];
}

// The products of the gradients v with the vectors y, of which z has a part in closed form.
//
// Their Hermitian part does not matter for one matrix, and a difference below rounding of v counts as
// zero: for a function of the span it is zero, and two eigenvalues may be close. `equal` is the distance
// of eigenvalues that count as one, `rounding` the same relative to the matrix.
template <class S>
inline void couple(int n, int k, const typename S::Number *y, const typename S::Number *rows,
                   const typename S::Number *values, double rounding, typename S::Number equal,
                   typename S::Entry *inside, typename S::Entry *normal) {
  using R = typename S::Number;
  using X = typename S::Entry;
  const int stride = S::stride_of(n);
  const R one = all_of<R>(1), none = all_of<R>(0), half = all_of<R>(0.5);
  for (int j = 0; j < k; ++j)
    for (int i = 0; i <= j; ++i) {
      const R *v = rows + j * stride, *w = rows + i * stride;
      const X up = S::dot(y + i * stride, v, n), down = conjugate(S::dot(y + j * stride, w, n));
      normal[i * k + j] = up * half + down * half;
      normal[j * k + i] = conjugate(normal[i * k + j]);
      const R rise = values[j] - values[i];
      const X turn = up * half - down * half;
      R most = none;  // the squares of v may overflow
      for (int l = 0; l < stride; ++l) most = larger(most, larger(size_of(v[l]), size_of(w[l])));
      const MaskOf<R> known =
          both(size_of(rise) > equal, largest_part(turn) > all_of<R>(rounding) * most);
      inside[i * k + j] =
          choose(known, turn / choose(rise == none, one, rise), from_real<X>(none));
      inside[j * k + i] = conjugate(inside[i * k + j]);
    }
}

// Stores Σ zyᴴ + yzᴴ. `K` holds a matrix, or two vectors along rows.
template <class S>
inline void store_product(int n, int k, int filled, const typename S::Number *z,
                          const typename S::Number *y, typename S::Number *K, Target to) {
  using R = typename S::Number;
  const int stride = S::stride_of(n);
  for (int r = 0; r < n; ++r) {
    row_of_product<S>(r, n, k, z, y, S::along_rows ? K : K + r * stride);
    if constexpr (S::along_rows)
      store_entries<S>(K, all_of<R>(1), 0, 1, n, to + r * n * S::parts);
  }
  if constexpr (!S::along_rows) store_entries<S>(K, all_of<R>(1), (long)n * n, filled, n * n, to);
}

// z ← ½(over·z + g·y), of which the product above with y is the gradient, where g is that of the value.
template <class S>
inline void add_values(const Backward &p, long first, int filled, typename S::Number over,
                       const typename S::Number *y, typename S::Number *z) {
  using R = typename S::Number;
  const int stride = S::stride_of(p.n);
  const R half = all_of<R>(0.5);
  for (int j = 0; j < p.k; ++j) {
    R *row = z + j * stride;
    scale<S>(row, half * over, p.n);
    if (!p.d_values) continue;
    R along;
    load_row(Source(p.d_values, p.kind) + (first * p.k + j), p.k, filled, 1, &along);
    S::add(row, from_real<typename S::Entry>(half * along), y + j * stride, p.n);
  }
}

// Solves (λI − S)z = v for each row, where z is orthogonal to the rows of y, by Cholesky's
// factorisation of λI − S + YᴴDY, in which D makes the matrix as large along y as it is elsewhere.
// For a gradient, the part of z along the other vectors follows in closed form. A pair is reduced to
// one matrix S, and its z is that of S, turned back.
template <class S>
inline long solve_complement(const Backward &p, long first, int filled, Arena arena) {
  using R = typename S::Number;
  using X = typename S::Entry;
  constexpr int lanes = Kind<R>::lanes;
  const int n = p.n, k = p.k, rows = p.rows, stride = S::stride_of(n);
  const bool pair = p.matrix;
  const ComplementMemory<S> memory(arena, n, k, rows, pair);
  R *const a = memory.a, *const K = memory.K, *const lower = memory.lower,
    *const inverse = memory.inverse, *const roots = memory.roots, *const probe = memory.probe,
    *const again = memory.again, *const right = memory.right, *const image = memory.image,
    *const y = memory.y, *const z = memory.z, *const null = memory.null,
    *const values = memory.values, *const shifts = memory.shifts;
  X *const inside = memory.inside, *const normal = memory.normal;
  const R one = all_of<R>(1), none = all_of<R>(0);
  const long start = first * n * n * S::parts;
  // The squares and the cubes of numbers of single precision are in the range of double precision.
  const Source matrix = pair ? Source(p.matrix, DOUBLE) : Source(p.A, p.kind);
  const R unit = matrix.single ? load<S, false>(matrix + start, n, filled, p.sign, a)
                               : load<S>(matrix + start, n, filled, p.sign, a);
  // Vectors along rows end in zeros, and without v, z is zero.
  if (S::along_rows) {
    for (int i = 0; i < stride; ++i)
      inverse[i] = roots[i] = probe[i] = again[i] = right[i] = image[i] = image[stride + i] = none;
    for (int i = 0; i < k * stride; ++i) y[i] = none;
  }
  for (int i = 0; i < rows * stride; ++i) z[i] = none;
  if (pair) load_factor<S>(p.factor + start, n, filled, lower, roots);
  for (int j = 0; j < k; ++j) {
    const long from = (first * k + j) * n * S::parts;
    const Source row = pair ? Source(p.x, DOUBLE) : Source(p.y, p.kind);
    load_entries<S>(row + from, (long)k * n, filled, n, y + j * stride);
  }
  // The rows have been rounded: in double precision they are normalised again.
  for (int j = 0; j < k; ++j) {
    R *row = y + j * stride;
    for (int i = 0; i < j; ++i)
      S::add(row, -S::dot(y + i * stride, row, n), y + i * stride, n);
    scale<S>(row, one / root(square<S>(row, n)), n);
    S::product(a, n, stride, row, image);
    values[j] = real_part(S::dot(image, row, n));
  }
  R size = norm_of<S>(a, n, probe, image);
  for (int j = 0; j < k; ++j) size = larger(size, size_of(values[j]));
  const R equal = all_of<R>(p.equal) * size;
  MaskOf<R> good = size == size;
  for (int j = 0; j < rows; ++j) {
    R *row = z + j * stride;
    if (p.shift) {
      // The shift is a rounded eigenvalue of one of the rows of y.
      load_row(Source(p.shift, p.kind) + (first * rows + j), rows, filled, 1, shifts + j);
      const R given = all_of<R>(p.sign) * shifts[j] / unit;
      R nearest = values[0];
      for (int i = 1; i < k; ++i)
        nearest = choose(size_of(values[i] - given) < size_of(nearest - given), values[i], nearest);
      shifts[j] = nearest;
    } else {
      shifts[j] = values[j];
    }
    if (!p.v) continue;
    const Source from = Source(p.v, p.kind) + (first * rows + j) * n * S::parts;
    load_entries<S>(from, (long)rows * n, filled, n, row);
    if (S::parts == 2 && !p.shift) {
      // The phase makes the sum of y real: the gradient counts as one that is orthogonal to iy.
      for (int i = 0; i < stride; ++i) right[i] = y[j * stride + i];
      if (pair) back<S>(lower, roots, n, right);
      const R turn = imaginary_part(S::dot(row, right, n)) / real_part(sum_of<S>(right, n));
      for (int i = 0; i < n; ++i) row[S::place(i, S::parts - 1)] += turn;
    }
    if (pair) forth<S>(lower, roots, n, row);
  }
  const bool coupled = p.v && !p.shift && k > 1;
  if (coupled || (p.v && p.d_metric)) couple<S>(n, k, y, z, values, p.equal, equal, inside, normal);
  // λI − S plus what makes it as large along y, and along the null vectors that are found, as it is
  // elsewhere.
  int nulls = 0;
  const auto factor = [&](R shift) {
    for (int r = 0; r < n; ++r) {
      R *row = K + r * stride;
      for (int c = 0; c < stride; ++c) row[c] = -a[r * stride + c];
      row[S::place(r, 0)] += shift;
      for (int i = 0; i < k; ++i) {
        const R *vector = y + i * stride;
        S::add_square(row, S::entry(vector, r) * (size - (shift - values[i])), vector, r, n);
      }
      for (int i = 0; i < nulls; ++i)
        S::add_square(row, S::entry(null + i * stride, r) * size, null + i * stride, r, n);
    }
    S::factor(K, n, stride, inverse, all_of<R>(EPS) * size);
  };
  const auto clear = [&](R *x) {
    for (int i = 0; i < k; ++i) S::add(x, -S::dot(y + i * stride, x, n), y + i * stride, n);
    for (int i = 0; i < nulls; ++i)
      S::add(x, -S::dot(null + i * stride, x, n), null + i * stride, n);
  };
  // Pivots of K are not below its least eigenvalue. So one that counts as zero tells of a null vector
  // without a search: K⁻¹ turns L⁻ᴴe into it, and its length says whether it is one. K is not factored
  // again: what K⁻¹ enlarges is along these vectors, and is removed.
  const auto find_nulls = [&] {
    while (nulls < NULLS) {
      R *next = null + nulls * stride, seen = none, growth = one;
      for (int i = 0; i < stride; ++i) next[i] = none;
      bool more = false;
      for (int c = 0; c < n; ++c) {
        const MaskOf<R> large = both(inverse[c] > none, inverse[c] * equal < one);
        const MaskOf<R> small = both(good, negate(large));
        if (!any(small)) continue;
        const MaskOf<R> turn = both(small, seen == all_of<R>(nulls));  // of each lane another pivot
        next[S::place(c, 0)] = choose(turn, one, none);
        seen += choose(small, one, none);
        more = more || any(turn);
      }
      if (!more) break;
      S::solve_upper(K, n, stride, next);
      for (int step = 0; step < 2; ++step) {
        if (step) S::solve(K, n, stride, inverse, next);
        clear(next);
        growth = square<S>(next, n);
        scale<S>(next, choose(growth > none, one / root(growth), none), n);
      }
      const MaskOf<R> singular = both(good, negate(growth * equal * equal <= one));
      scale<S>(next, choose(singular, one, none), n);
      ++nulls;
    }
  };
  for (int j = 0; j < rows && p.v; ++j) {
    bool fresh = j == 0 || nulls > 0;
    for (int l = 0; l < lanes && !fresh; ++l) fresh = get(shifts[j], l) != get(shifts[j - 1], l);
    nulls = 0;
    if (fresh) factor(shifts[j]), find_nulls();
    R *row = z + j * stride;
    clear(row);
    for (int i = 0; i < stride; ++i) right[i] = row[i];
    for (;;) {
      clear(row);
      S::solve(K, n, stride, inverse, row);
      clear(row);
      // ‖K⁻¹z‖/‖z‖ is a lower bound of 1/gap, close to it where a small gap matters. If the gap is
      // rounding, K⁻¹z is a null vector: there is no derivative along it, and z gets no part along it.
      for (int i = 0; i < stride; ++i) again[i] = row[i];
      S::solve(K, n, stride, inverse, again);
      clear(again);
      const R growth = square<S>(again, n), length = square<S>(row, n);
      const MaskOf<R> singular = both(good, negate(growth * equal * equal <= length));
      if (!any(singular)) break;
      if (nulls == NULLS) {
        good = both(good, negate(singular));
        break;
      }
      R *next = null + nulls * stride;
      for (int i = 0; i < stride; ++i) next[i] = again[i];
      scale<S>(next, choose(singular, one / root(growth), none), n);
      ++nulls;
      factor(shifts[j]);
      for (int i = 0; i < stride; ++i) row[i] = right[i];
    }
    for (int i = 0; i < k && coupled; ++i) S::add(row, inside[i * k + j], y + i * stride, n);
  }
  const R over = p.v ? all_of<R>(p.sign) / unit : one;
  if (p.shift) {
    for (int j = 0; j < rows; ++j)
      store_entries<S>(z + j * stride, over, (long)rows * n, filled, n,
                       Target(p.result, p.kind) + (first * rows + j) * n * S::parts);
    return report<R>(good, first, filled, p.failed);
  }
  for (int j = 0; j < k && pair; ++j) {
    back<S>(lower, roots, n, y + j * stride);
    back<S>(lower, roots, n, z + j * stride);
  }
  add_values<S>(p, first, filled, over, y, z);
  R *product = S::along_rows ? image : K;
  if (p.result) store_product<S>(n, k, filled, z, y, product, Target(p.result, p.kind) + start);
  if (p.d_metric) {
    for (int j = 0; j < k; ++j) {
      scale<S>(z + j * stride, -values[j] * unit * all_of<R>(p.sign), n);
      for (int i = 0; i < k && p.v; ++i)
        S::add(z + j * stride, normal[i * k + j] * all_of<R>(-0.25), y + i * stride, n);
    }
    store_product<S>(n, k, filled, z, y, product, Target(p.d_metric, p.kind) + start);
  }
  return report<R>(good, first, filled, p.failed);
}

// The memory of `differentiate_reductions`.
struct ReducedMemory {
  Lanes *down, *up, *spare, *t, *w, *rest, *again, *d, *e;
  Lanes *rows;
  double *z, *y;             // rows of each slot
  double *image;             // two rows
  double *inside, *normal;   // the first of each slot

  ReducedMemory(Arena &arena, int n, int k, int slots) {
    const long stride = Medium::stride_of(n);
    for (Lanes **row : {&down, &up, &spare, &t, &w, &rest, &again, &d, &e})
      *row = arena.take<Lanes>(n);
    rows = arena.take<Lanes>((long)k * n);
    z = arena.take<double>(slots * k * stride);
    y = arena.take<double>(slots * k * stride);
    image = arena.take<double>(2 * stride);
    inside = arena.take<double>((long)slots * k * k);
    normal = arena.take<double>((long)k * k);
  }
};

// A lower bound of the norm of a matrix: the largest column of T, or the largest of its eigenvalues that
// are known.
inline double size_of(const Reduction &kept) {
  double size = 0;
  for (int i = 0; i < kept.n; ++i) {
    const double before = i ? kept.e()[i - 1] : 0, behind = i + 1 < kept.n ? kept.e()[i] : 0;
    size = larger(size, kept.d()[i] * kept.d()[i] + before * before + behind * behind);
  }
  size = root(size);
  for (int j = 0; j < kept.k; ++j) size = larger(size, size_of(kept.values()[j]));
  return size;
}

// The same gradients from the reductions of the forward pass, of `filled` matrices, at most WIDTH. Their
// tridiagonal systems, k for each, are solved in lanes. What the numbers of one lane make necessary is
// done for that lane alone, so that no matrix depends on another. Entries whose eigenvalue repeats, or
// whose solution rounding has spoilt, are left out: their bits in the result are set.
inline unsigned differentiate_reductions(const Backward &p, long first, int filled, Arena arena) {
  using S = Medium;
  const int n = p.n, k = p.k, stride = S::stride_of(n), systems = p.v ? filled * k : 0;
  const ReducedMemory memory(arena, n, k, filled);
  Lanes *const down = memory.down, *const up = memory.up, *const spare = memory.spare,
        *const t = memory.t, *const w = memory.w, *const rest = memory.rest,
        *const again = memory.again, *const d = memory.d, *const e = memory.e,
        *const rows = memory.rows;
  double *const z = memory.z, *const y = memory.y, *const image = memory.image,
         *const inside = memory.inside, *const normal = memory.normal;
  double sizes[WIDTH];
  unsigned left_out = 0;
  const auto kept_of = [&](int slot) {
    const long start = (first + slot) * Reduction::numbers(n, k);
    return Reduction(n, k, const_cast<double *>(p.reduction) + start);
  };
  for (int i = 0; i < filled * k * stride; ++i) z[i] = y[i] = 0;
  for (int slot = 0; slot < filled; ++slot) {
    double *zs = z + slot * k * stride;
    for (int j = 0; j < k; ++j) {
      const long from = ((first + slot) * k + j) * n;
      load_row(Source(p.y, p.kind) + from, 0, 1, n, y + (slot * k + j) * stride);
      if (p.v) load_row(Source(p.v, p.kind) + from, 0, 1, n, zs + j * stride);
    }
    if (!p.v) continue;
    const Reduction kept = kept_of(slot);
    kept.turn(zs, k);
    sizes[slot] = size_of(kept);
    if (sizes[slot] == 0) left_out |= 1u << slot;
    if (k > 1)
      couple<S>(n, k, kept.row(0), zs, kept.values(), p.equal, p.equal * sizes[slot],
                inside + slot * k * k, normal);
  }
  const auto clear = [&](Lanes *x) {
    for (int i = 0; i < k; ++i) {
      const Lanes *s = rows + i * n;
      const Lanes along = dot(s, x, n);
      for (int l = 0; l < n; ++l) x[l] -= s[l] * along;
    }
  };
  for (int begin = 0; begin < systems; begin += WIDTH) {
    ShiftedTridiagonal<Lanes> system{n, d, e, {}, {}, down, up, spare};
    Lanes size;
    for (int lane = 0; lane < WIDTH && begin + lane < systems; ++lane) {
      const int index = begin + lane, slot = index / k;
      const auto fill = [lane](Lanes &x, double value) {
        if (lane == 0)
          x = spread(value);  // unused lanes repeat the first
        else
          x[lane] = value;
      };
      const Reduction kept = kept_of(slot);
      const double *s = kept.row(index % k);
      int largest = 0;
      for (int i = 1; i < n; ++i)
        if (size_of(s[i]) > size_of(s[largest])) largest = i;
      fill(system.shift, kept.values()[index % k]);
      fill(system.removed, largest);
      fill(size, sizes[slot]);
      for (int i = 0; i < n; ++i) {
        fill(d[i], kept.d()[i]);
        fill(e[i], i + 1 < n ? kept.e()[i] : 0);
        fill(t[i], z[index * stride + i]);
        for (int j = 0; j < k; ++j) fill(rows[j * n + i], kept.row(j)[i]);
      }
    }
    system.factor();
    clear(t);
    system.solve(t, w);
    clear(w);
    // With a residual of rounding, w is exact for a matrix that differs from T by rounding.
    LaneMask bad;
    for (int step = 0;; ++step) {
      system.residual(t, w, rest);
      clear(rest);
      const Lanes bound = spread(RESIDUAL * EPS) * (size * root(dot(w, w, n)) + root(dot(t, t, n)));
      bad = negate(root(dot(rest, rest, n)) <= bound);
      if (!any(bad) || step == 2) break;
      system.solve(rest, again);
      clear(again);
      for (int i = 0; i < n; ++i) w[i] += choose(bad, again[i], spread(0));
    }
    // As in `solve_complement`: where the gap to the next eigenvalue is rounding, w grows once more.
    system.solve(w, again);
    clear(again);
    const Lanes equal = spread(p.equal) * size, growth = dot(again, again, n) * equal * equal;
    bad = either(bad, negate(growth <= dot(w, w, n)));
    for (int lane = 0; lane < WIDTH && begin + lane < systems; ++lane) {
      if (is_set(bad, lane)) left_out |= 1u << ((begin + lane) / k);
      double *row = z + (begin + lane) * stride;
      for (int i = 0; i < n; ++i) row[i] = w[i][lane];
    }
  }
  for (int slot = 0; slot < filled; ++slot) {
    if (left_out >> slot & 1) continue;
    const Reduction kept = kept_of(slot);
    double *zs = z + slot * k * stride, *ys = y + slot * k * stride;
    if (p.v) {
      for (int j = 0; j < k && k > 1; ++j)
        for (int i = 0; i < k; ++i)
          S::add(zs + j * stride, inside[(slot * k + i) * k + j], kept.row(i), n);
      kept.turn_back(zs, k);
    }
    add_values<S>(p, first + slot, 1, p.v ? p.sign / kept.unit() : 1, ys, zs);
    store_product<S>(n, k, 1, zs, ys, image, Target(p.result, p.kind) + (first + slot) * n * n);
    if (p.failed) p.failed[first + slot] = false;
  }
  return left_out;
}

}  // namespace
}  // namespace pmaf
