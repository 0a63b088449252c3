// The layer LESS: least squares on the unit sphere, and its gradients, for matrices of float.
//
// AᵀA in double precision has all digits of A. It is reduced to a tridiagonal matrix T, of which one
// eigenpair is computed, the lowest: with it, every step of the secular equation takes O(n), in hard
// cases too. For a wide A, AAᵀ takes the place of AᵀA, and the null space that of the lowest vector.
#pragma once

#include "api.hpp"
#include "arena.hpp"
#include "gram.hpp"
#include "reduction.hpp"

namespace pmaf {
namespace {

constexpr double SINGLE = 1.1920928955078125e-07;  // eps of float
constexpr double EQUAL = 8 * SINGLE;               // singular values that count as one, or as zero

// T + shift·I, eliminated from both ends towards the row `twist`.
//
// If this is the row in which the lowest eigenvector is largest, a singularity of the matrix appears
// in the last pivot alone, and the error of a solution is a multiple of that vector.
template <class R> struct Twisted {
  const Tridiagonal<R> &t;
  R twist;
  R *down, *up, *first, *second;  // reciprocals of the pivots, and right-hand sides
  R shift, last;

  void prepare(R by) {
    const int n = t.n;
    const R least = all_of<R>(PIVOT), one = all_of<R>(1);
    shift = by;
    down[0] = one / away_from_zero(t.d[0] + by, least);
    for (int i = 1; i < n; ++i)
      down[i] = one / away_from_zero(t.d[i] + by - t.e2[i - 1] * down[i - 1], least);
    up[n - 1] = one / away_from_zero(t.d[n - 1] + by, least);
    for (int i = n - 2; i >= 0; --i)
      up[i] = one / away_from_zero(t.d[i] + by - t.e2[i] * up[i + 1], least);
    last = one;
    for (int i = 0; i < n; ++i) {
      R pivot = t.d[i] + by;
      if (i > 0) pivot -= t.e2[i - 1] * down[i - 1];
      if (i + 1 < n) pivot -= t.e2[i] * up[i + 1];
      last = choose(twist == all_of<R>(i), pivot, last);
    }
    last = one / choose(size_of(last) < t.unit, t.unit, last);
  }

  void solve(const R *c, R *x) const {
    const int n = t.n;
    R at_twist = c[0];
    first[0] = c[0];
    for (int i = 1; i < n; ++i) first[i] = c[i] - t.e[i - 1] * down[i - 1] * first[i - 1];
    second[n - 1] = c[n - 1];
    for (int i = n - 2; i >= 0; --i) second[i] = c[i] - t.e[i] * up[i + 1] * second[i + 1];
    // Both eliminations have arrived at the row, and have its right-hand side in common.
    for (int i = 0; i < n; ++i)
      at_twist = choose(twist == all_of<R>(i), first[i] + second[i] - c[i], at_twist);
    const R middle = at_twist * last;
    for (int i = 0; i < n; ++i) x[i] = choose(twist == all_of<R>(i), middle, all_of<R>(0));
    for (int i = n - 2; i >= 0; --i)
      x[i] = choose(all_of<R>(i) < twist, (first[i] - t.e[i] * x[i + 1]) * down[i], x[i]);
    for (int i = 1; i < n; ++i)
      x[i] = choose(all_of<R>(i) > twist, (second[i] - t.e[i - 1] * x[i - 1]) * up[i], x[i]);
  }
};

// The memory of `find_minimum`, besides the copy of A.
template <class S> struct MinimumMemory {
  using R = typename S::Number;
  R *G, *panel;
  R *work;  // five rows
  R *d, *e, *e2, *tau, *low_d, *low_e, *lowest, *c, *x, *w, *image;
  R *b, *u, *other, *copy;

  MinimumMemory(Arena &arena, int m, int n) {
    const long p = m < n ? m : n, stride = S::stride_of((int)p);
    G = arena.take<R>(p * stride);
    panel = arena.take<R>(PANEL * stride);
    work = arena.take<R>(5 * stride);
    for (R **row : {&d, &e, &e2, &tau, &low_d, &low_e, &lowest, &c, &x, &w, &image})
      *row = arena.take<R>(stride);
    b = arena.take<R>(m);
    u = arena.take<R>(n);
    other = arena.take<R>(n);
    copy = arena.take<R>(Wrapped<R>::copied(m, n));
  }
};

template <class S>
inline long find_minimum(const LeastSquares &problem, long from, int filled, Arena arena) {
  using R = typename S::Number;
  const int m = problem.m, n = problem.n, p = m < n ? m : n, stride = S::stride_of(p);
  const bool tall = m >= n;
  const R one = all_of<R>(1), none = all_of<R>(0);
  const MinimumMemory<S> memory(arena, m, n);
  R *const G = memory.G, *const panel = memory.panel, *const work = memory.work,
    *const d = memory.d, *const e = memory.e, *const e2 = memory.e2, *const tau = memory.tau,
    *const low_d = memory.low_d, *const low_e = memory.low_e, *const lowest = memory.lowest,
    *const c = memory.c, *const x = memory.x, *const w = memory.w, *const image = memory.image,
    *const b = memory.b, *const u = memory.u, *const other = memory.other;
  Wrapped<R> A{problem.A + from * m * n, m, n, filled, memory.copy};
  A.interleave();
  load_row<R, float>(problem.b + from * m, m, filled, m, b);
  gram<S>(A, stride, G, panel);
  if constexpr (!S::along_rows)
    for (int i = 0; i < p && problem.kept; ++i)
      store_row(G + i * stride, one, (long)p * p, filled, p, problem.kept + (from * p + i) * p);
  for (int i = 0; i < stride; ++i) c[i] = x[i] = w[i] = image[i] = lowest[i] = none;
  // In these units the largest entry of the matrix is about one.
  R largest = none;
  for (int i = 0; i < p; ++i) largest = larger(largest, G[i * stride + i]);
  const R unit = power_of_two(largest), over = one / unit;
  if constexpr (S::along_rows)
    for (int i = 0; i < p * stride / WIDTH; ++i) at(G)[i] *= spread(over);
  else
    for (int i = 0; i < p * stride; ++i) G[i] *= over;
  if (tall)
    A.add_transposed(b, c);
  else
    for (int i = 0; i < m; ++i) c[i] = b[i];
  const R length = root(dot(b, b, m));
  const R pull_unit = tall ? over : root(over);  // Aᵀb in units of AᵀA, or b in those of A
  for (int i = 0; i < p; ++i) c[i] *= pull_unit;
  S::reduce(G, p, stride, d, e, tau, work);
  S::turn(G, p, stride, tau, c);
  Tridiagonal<R> t{p, d, e, e2, {}, {}, {}};
  t.prepare();
  const R top = root(larger(t.high, none));  // at least the largest singular value
  MaskOf<R> good = top == top;
  R floor = none, along = none, twist = all_of<R>(p - 1);
  if (tall) {
    // The lowest eigenpair is the largest of −T.
    for (int i = 0; i < p; ++i) {
      low_d[i] = -d[i];
      low_e[i] = i + 1 < p ? -e[i] : none;
    }
    Tridiagonal<R> turned{p, low_d, low_e, e2, {}, {}, {}};
    R value = none;
    good = both(good, largest_pairs(turned, 1, &value, lowest, stride, work));
    floor = larger(-value, none);
    const R s = root(floor);
    const MaskOf<R> present = s > all_of<R>(EQUAL) * top;
    // Only one singular value may count as the lowest.
    const R next = s + all_of<R>(EQUAL) * top;
    good = both(good, all_of<R>(p - 1.5) < count_above(t, next * next));
    for (int i = 0; i < p; ++i) d[i] -= -value;
    t.prepare();
    R most = none;
    for (int i = 0; i < p; ++i) {
      const MaskOf<R> more = size_of(lowest[i]) > most;
      most = choose(more, size_of(lowest[i]), most);
      twist = choose(more, all_of<R>(i), twist);
    }
    along = choose(present, dot(c, lowest, p), none);
    floor = choose(present, floor, none);
    orthogonal_to(c, lowest, p);
    orthogonal_to(c, lowest, p);
  } else {
    // No singular value may count as zero.
    const R zero = all_of<R>(EQUAL) * top;
    good = both(good, all_of<R>(p - 0.5) < count_above(t, zero * zero));
  }
  Twisted<R> system{t, twist, work, work + stride, work + 2 * stride, work + 3 * stride, none, one};
  // ‖x‖² for a tall A, xᵀTx for a wide one, whose derivative is −2 times the other product.
  auto squares = [&](R at, R &square, R &slope) {
    system.prepare(at);
    system.solve(c, x);
    if (tall) orthogonal_to(x, lowest, p);
    system.solve(x, w);
    if (tall) {
      orthogonal_to(w, lowest, p);
      square = dot(x, x, p);
      slope = dot(x, w, p);
    } else {
      square = slope = none;
      for (int i = 0; i < p; ++i) {
        R y = d[i] * x[i];
        if (i > 0) y += e[i - 1] * x[i - 1];
        if (i + 1 < p) y += e[i] * x[i + 1];
        square += x[i] * y;
        slope += w[i] * y;
      }
    }
  };
  R square, slope;
  const R pull = size_of(along), noise = all_of<R>(EQUAL) * root(floor) * length * root(over);
  squares(none, square, slope);
  const MaskOf<R> tied = pull <= noise;
  const MaskOf<R> hard = both(tied, square < one);
  R whole = dot(c, c, p) + along * along;
  if (!tall) {
    whole = none;
    for (int i = 0; i < p; ++i) {
      R y = d[i] * c[i];
      if (i > 0) y += e[i - 1] * c[i - 1];
      if (i + 1 < p) y += e[i] * c[i + 1];
      whole += c[i] * y;
    }
  }
  R at = larger(larger(pull, root(larger(whole, none)) - t.high), all_of<R>(1e-290));
  MaskOf<R> active = negate(hard);
  for (int step = 0; step < 100 && any(active); ++step) {
    squares(at, square, slope);
    const R share = along / at;
    square += share * share;
    slope += share * share / at;
    const R excess = root(square) - one;
    // Newton's iterates increase from the left bound. The first that does not has reached rounding.
    const R following = at + square * excess / slope;
    active = both(active, both(following > at, excess > all_of<R>(1e-13)));
    at = choose(active, following, at);
  }
  at = choose(hard, none, at);
  squares(at, square, slope);
  const R share = choose(hard, none, along / choose(hard, one, at));
  const R rest = one - square - share * share;
  good = both(good, either(hard, size_of(rest) < all_of<R>(1e-8)));
  if (tall) add(x, share, lowest, p);
  const R height = root(larger(choose(hard, one - square, none), none));
  for (int i = p; i < stride; ++i) x[i] = none;
  S::turn_back(G, p, stride, tau, x);
  if (tall) {
    for (int i = 0; i < n; ++i) u[i] = x[i];
    if (any(hard)) {
      for (int i = 0; i < stride; ++i) w[i] = lowest[i];
      S::turn_back(G, p, stride, tau, w);
      add(u, height * sign_of(w, n, problem.second, all_of<R>(1.5e-8 * root((double)n))), w, n);
    }
  } else {
    const R factor = root(over);
    for (int i = 0; i < m; ++i) x[i] *= factor;
    for (int j = 0; j < n; ++j) u[j] = none;
    A.add_transposed(x, u);
    if (any(hard)) {
      // The projection of all ones onto the null space, or of another direction if that is zero.
      system.prepare(none);
      R least = none;
      for (int pass = 0; pass < 2; ++pass) {
        for (int i = 0; i < n; ++i)
          other[i] = pass == 0 ? one : all_of<R>(problem.second[i]);
        const R before = root(dot(other, other, n));
        A.times(other, image);
        for (int i = 0; i < m; ++i) image[i] *= factor;
        for (int i = m; i < stride; ++i) image[i] = none;
        S::turn(G, p, stride, tau, image);
        system.solve(image, x);
        for (int i = p; i < stride; ++i) x[i] = none;
        S::turn_back(G, p, stride, tau, x);
        for (int i = 0; i < m; ++i) x[i] *= -factor;
        A.add_transposed(x, other);
        const R size = root(dot(other, other, n));
        const MaskOf<R> use =
            both(both(hard, least == none), size > all_of<R>(1.5e-8) * before);
        const R amount = choose(use, height / choose(use, size, one), none);
        add(u, amount, other, n);
        least = choose(use, size, least);
      }
      good = both(good, either(negate(hard), least > none));
    }
  }
  at = choose(at <= all_of<R>(1e-290), none, at);
  if constexpr (S::along_rows)
    if (problem.kept) {
      const Reduction kept(p, 1, problem.kept + from * Reduction::numbers(p, 1));
      kept.store(G, tau, d, e);
      for (int i = 0; i < stride; ++i) kept.row(0)[i] = lowest[i];
      kept.values()[0] = at;
      kept.unit() = good ? unit : 0;  // zero says that there is no solution
    }
  store_row(u, one / root(dot(u, u, n)), n, filled, n, problem.u + from * n);
  const R multiplier = (at - floor) * unit, gap = at * unit;
  store_row(&multiplier, one, 1, filled, 1, problem.multiplier + from);
  store_row(&gap, one, 1, filled, 1, problem.gap + from);
  return report<R>(good, from, filled, problem.failed);
}

// What the backward pass is given of one problem, or of one in each lane, with r = Au for now.
//
// With z the solution of P(AᵀA + μI)Pz = Pv, uᵀz = 0, where P = I − uuᵀ, the gradients are Az for b and
// −((Au − b)zᵀ + (Az)uᵀ) for A.
template <class R> struct Tangent {
  const Wrapped<R> &A;
  R *u, *v, *r, mu;

  // rest ← P(v − (AᵀA + μI)z)
  void residual(const R *z, R *image, R *rest) const {
    A.times(z, image);
    for (int i = 0; i < A.m; ++i) image[i] = -image[i];
    for (int j = 0; j < A.n; ++j) rest[j] = v[j] - mu * z[j];
    A.add_transposed(image, rest);
    orthogonal_to(rest, u, A.n);
  }

  // z for a wide A. With f = (AAᵀ)⁻¹Av, the part of v in the range of Aᵀ is Aᵀf; there the inverse of
  // AᵀA + μI gives Aᵀg for g = (AAᵀ + μI)⁻¹f. The rest is in the null space, where the inverse is 1/μ.
  // In the same way, h and o follow from Au. The last two arguments are memory.
  MaskOf<R> wide(const R *f, const R *g, const R *h, const R *o, R size, R *z, R *image, R *w) const {
    const int m = A.m, n = A.n;
    const R one = all_of<R>(1), none = all_of<R>(0), least = all_of<R>(EQUAL * EQUAL);
    const MaskOf<R> unique = is_less(least * size, mu);
    MaskOf<R> good = size == size;
    const R s_yy = dot(o, r, m), s_vy = dot(g, r, m);
    // If u is unique it is in the range of Aᵀ. Else all solutions of Au = b with its length are as
    // good, and z is the shortest solution of its singular system, with w the part of u that is in the
    // null space.
    R along = -s_vy / s_yy, outside = none;
    if (any(negate(unique))) {
      for (int j = 0; j < n; ++j) w[j] = u[j];
      for (int i = 0; i < m; ++i) image[i] = -h[i];
      A.add_transposed(image, w);
      const R height = dot(w, w, n), share = dot(v, w, n) / choose(unique, one, height);
      good = both(good, either(unique, is_less(least, height)));
      along = choose(unique, along, -share);
      outside = choose(unique, none, (s_yy * share - s_vy) / choose(unique, one, height));
    } else {
      for (int j = 0; j < n; ++j) w[j] = none;
    }
    const R over = choose(unique, one / choose(unique, mu, one), none);
    for (int i = 0; i < m; ++i) image[i] = g[i] + along * o[i] - over * f[i];
    for (int j = 0; j < n; ++j) z[j] = over * v[j] + outside * w[j];
    A.add_transposed(image, z);
    orthogonal_to(z, u, n);
    return good;
  }
};

// The memory of `factor_tangent`.
template <class S> struct FactorMemory {
  using R = typename S::Number;
  R *G, *K, *panel, *inverse, *other, *f, *g, *h, *o;

  FactorMemory(Arena &arena, int m, int n) {
    const long p = m < n ? m : n, stride = S::stride_of((int)p);
    G = arena.take<R>(p * stride);
    K = arena.take<R>(m < n ? p * stride : 0);
    panel = arena.take<R>(PANEL * stride);
    for (R **row : {&inverse, &other, &f, &g, &h, &o}) *row = arena.take<R>(stride);
  }
};

// z by Cholesky's factorisation, and where it is exact.
template <class S, class R = typename S::Number>
inline MaskOf<R> factor_tangent(const LeastSquaresBackward &problem, long from, int filled,
                                const Tangent<R> &given, Arena arena, R *z, R *image, R *w) {
  const Wrapped<R> &A = given.A;
  const int m = A.m, n = A.n, p = m < n ? m : n, stride = S::stride_of(p);
  const R none = all_of<R>(0), least = all_of<R>(EQUAL * EQUAL);
  const FactorMemory<S> memory(arena, m, n);
  R *const G = memory.G, *const K = memory.K, *const panel = memory.panel,
    *const inverse = memory.inverse, *const other = memory.other, *const f = memory.f,
    *const g = memory.g, *const h = memory.h, *const o = memory.o;
  if (problem.kept && !S::along_rows)
    for (int i = 0; i < p; ++i)
      load_row<R, double>(problem.kept + (from * p + i) * p, (long)p * p, filled, p, G + i * stride);
  else
    gram<S>(A, stride, G, panel);
  R size = none;
  for (int i = 0; i < p; ++i) size += G[i * stride + i];
  size /= all_of<R>(p);
  MaskOf<R> good = size == size;
  for (int i = 0; i < stride; ++i) inverse[i] = other[i] = f[i] = g[i] = h[i] = o[i] = none;
  if (m >= n) {
    const R *u = given.u, *v = given.v;
    for (int i = 0; i < n; ++i) f[i] = u[i];
    for (int i = 0; i < n; ++i) {
      add(G + i * stride, size * f[i], f, p);
      G[i * stride + i] += given.mu;
    }
    good = both(good, S::factor(G, p, stride, inverse, all_of<R>(EPS * EPS) * size));
    for (int i = 0; i < n; ++i) g[i] = v[i], h[i] = u[i];
    S::solve(G, p, stride, inverse, g);
    S::solve(G, p, stride, inverse, h);
    const R along = dot(h, f, p);
    add(g, -dot(g, f, p) / along, h, p);
    orthogonal_to(g, f, p);
    for (int i = 0; i < n; ++i) z[i] = g[i];
    // ‖K⁻¹z‖/‖z‖ shows how close to singular the system is where that matters.
    S::solve(G, p, stride, inverse, g);
    for (int i = 0; i < n; ++i) h[i] = z[i];
    return both(good, dot(g, g, p) * least * size * least * size <= dot(h, h, p));
  }
  for (int i = 0; i < p * stride; ++i) K[i] = G[i];
  for (int i = 0; i < p; ++i) K[i * stride + i] += given.mu;
  good = both(good, S::factor(G, p, stride, inverse, all_of<R>(EPS * EPS) * size));
  good = both(good, S::factor(K, p, stride, other, all_of<R>(EPS * EPS) * size));
  const auto split = [&](const R *x, R *part, R *inside) {
    for (int i = 0; i < m; ++i) part[i] = x[i];
    S::solve(G, p, stride, inverse, part);
    for (int i = 0; i < m; ++i) inside[i] = part[i];
    S::solve(K, p, stride, other, inside);
  };
  A.times(given.v, image);
  split(image, f, g);
  split(given.r, h, o);
  return both(good, given.wide(f, g, h, o, size, z, image, w));
}

// z by the reduction that the forward pass has kept, in coordinates of T, in which systems take O(n).
struct ReducedTangent {
  static constexpr int ROWS = 12;  // of memory, which is of one piece
  // Up to this condition number of a system, its solution has all digits of float.
  static constexpr double EXACT = 1e7;

  const Reduction kept;
  double *memory;
  Tridiagonal<double> t{};
  double at = kept.values()[0], unit = kept.unit();

  ReducedTangent(const Reduction &kept, double *memory) : kept(kept), memory(memory) {
    t.n = kept.n, t.d = kept.d(), t.e = kept.e(), t.e2 = row(0);
    t.prepare();
  }
  double *row(int i) const { return memory + (long)i * kept.stride; }
  double dot(const double *x, const double *y) const {
    return dot_from<double>(x, y, 0, kept.stride);
  }
  void add(double *x, double factor, const double *y) const {
    add_from<double>(x, factor, y, 0, kept.stride);
  }
  void copy(const double *from, double *to) const {
    for (int i = 0; i < kept.n; ++i) to[i] = from[i];
    for (int i = kept.n; i < kept.stride; ++i) to[i] = 0;
  }
  Twisted<double> system(int twist) const {
    return {t, (double)twist, row(8), row(9), row(10), row(11), 0, 0};
  }
  // The mean of the eigenvalues, `floor` of which is not in T.
  double mean(double floor) const {
    for (int i = 0; i < t.n; ++i) floor += t.d[i] / t.n;
    return floor;
  }

  // For a tall A, of which T is AᵀA less its lowest eigenvalue. With s the lowest eigenvector, and x_u
  // and x_v the solutions for u and v on its complement, z = ζs + x_v − νx_u. Two equations are left for
  // ζ and ν, which have a solution in hard cases too.
  bool tall(const Tangent<double> &given, double *z, double *image) const {
    const int n = kept.n;
    const double *s = kept.row(0);
    double *f = row(1), *g = row(2), *x_u = row(3), *x_v = row(4), *x = row(5), *y = row(6);
    copy(given.u, f), copy(given.v, g);
    kept.turn(f, 2);
    int twist = 0;
    for (int i = 1; i < n; ++i)
      if (size_of(s[i]) > size_of(s[twist])) twist = i;
    Twisted<double> shifted = system(twist);
    shifted.prepare(at);
    const auto solve = [&](double *right, double *found) {
      const double along = dot(right, s);
      add(right, -along, s);
      add(right, -dot(right, s), s);
      shifted.solve(right, found);
      for (int i = n; i < kept.stride; ++i) found[i] = 0;
      add(found, -dot(found, s), s);
      return along;
    };
    const double beta = solve(f, x_u), q = dot(f, x_u), whole = at * q + beta * beta;
    const auto tangent = [&](double *right, double *found) {
      const double along = solve(right, x_v), w = dot(f, x_v);
      for (int i = 0; i < kept.stride; ++i) found[i] = x_v[i];
      add(found, -(at * w + beta * along) / whole, x_u);
      add(found, (along * q - beta * w) / whole, s);
      // Rounding has left a part along u, which is f + βs.
      const double rest = dot(found, f) + beta * dot(found, s);
      add(found, -rest, f);
      add(found, -rest * beta, s);
    };
    tangent(g, x);
    copy(x, g);
    tangent(g, y);
    const double length = dot(x, x), size = mean(at - given.mu / unit);
    const double growth = size * size * dot(y, y);
    kept.turn_back(x, 1);
    for (int i = 0; i < n; ++i) z[i] = x[i] / unit;
    if (growth > EXACT * EXACT * length) {
      // T has an error of rounding, relative to ‖A‖²; products with A have a smaller one.
      given.residual(z, image, x);
      copy(x, g);
      kept.turn(g, 1);
      tangent(g, x);
      kept.turn_back(x, 1);
      for (int i = 0; i < n; ++i) z[i] += x[i] / unit;
    }
    return whole > 0 && growth * EQUAL * EQUAL * EQUAL * EQUAL <= length;
  }

  bool wide(const Tangent<double> &given, double *z, double *image, double *w) const {
    const int m = kept.n;
    Twisted<double> shifted = system(m - 1);
    const double size = mean(0), most = EXACT / size;
    bool exact = true;
    const auto split = [&](const double *x, double *part) {
      double *right = row(7), *inside = part + kept.stride;
      copy(x, right);
      kept.turn(right, 1);
      shifted.prepare(0);
      shifted.solve(right, part);
      // T has an error of rounding, relative to its largest eigenvalue: if that matters, a factor of AAᵀ
      // is more exact.
      shifted.solve(part, right);
      for (int i = m; i < kept.stride; ++i) part[i] = right[i] = 0;
      exact = exact && dot(right, right) <= most * most * dot(part, part);
      shifted.prepare(at);
      shifted.solve(part, inside);
      for (int i = m; i < kept.stride; ++i) inside[i] = 0;
      kept.turn_back(part, 2);
      for (int i = 0; i < m; ++i) part[i] /= unit, inside[i] /= unit * unit;
    };
    given.A.times(given.v, image);
    split(image, row(1));
    split(given.r, row(3));
    return exact && given.wide(row(1), row(2), row(3), row(4), size * unit, z, image, w);
  }
};

// The memory of `differentiate_minimum`, of which `rows` are those of `ReducedTangent`.
template <class S> struct DifferentialMemory {
  using R = typename S::Number;
  R *b, *r, *image, *u, *v, *z, *w, *rows, *copy;

  DifferentialMemory(Arena &arena, int m, int n) {
    for (R **x : {&b, &r, &image}) *x = arena.take<R>(m);
    for (R **x : {&u, &v, &z, &w}) *x = arena.take<R>(n);
    rows = arena.take<R>(S::along_rows ? ReducedTangent::ROWS * S::stride_of(m < n ? m : n) : 0);
    copy = arena.take<R>(Wrapped<R>::copied(m, n));
  }
};

// Its memory, and that of `factor_tangent`, which it calls.
template <class S> struct DifferentialMemories {
  DifferentialMemories(Arena &arena, int m, int n) {
    DifferentialMemory<S>(arena, m, n);
    FactorMemory<S>(arena, m, n);
  }
};

template <class S>
inline long differentiate_minimum(const LeastSquaresBackward &problem, long from, int filled,
                                  Arena arena) {
  using R = typename S::Number;
  const int m = problem.m, n = problem.n;
  const R one = all_of<R>(1);
  const DifferentialMemory<S> memory(arena, m, n);
  R *const b = memory.b, *const r = memory.r, *const image = memory.image, *const u = memory.u,
    *const v = memory.v, *const z = memory.z, *const w = memory.w;
  Wrapped<R> A{problem.A + from * m * n, m, n, filled, memory.copy};
  A.interleave();
  load_row<R, float>(problem.b + from * m, m, filled, m, b);
  load_row<R, float>(problem.u + from * n, n, filled, n, u);
  load_row<R, float>(problem.v + from * n, n, filled, n, v);
  R mu;
  load_row<R, double>(problem.multiplier + from, 1, filled, 1, &mu);
  const R length = one / root(dot(u, u, n));
  for (int i = 0; i < n; ++i) u[i] *= length;
  orthogonal_to(v, u, n);
  A.times(u, r);
  const Tangent<R> given{A, u, v, r, mu};
  bool solved = false;
  if constexpr (S::along_rows)
    if (problem.kept) {
      double *numbers = const_cast<double *>(problem.kept);  // which are not changed
      const int p = m < n ? m : n;
      const Reduction kept(p, 1, numbers + from * Reduction::numbers(p, 1));
      const ReducedTangent reduced(kept, memory.rows);
      if (kept.unit() > 0)
        solved = m >= n ? reduced.tall(given, z, image) : reduced.wide(given, z, image, w);
    }
  MaskOf<R> good = one == one;
  if (!solved) good = factor_tangent<S>(problem, from, filled, given, arena, z, image, w);
  A.times(z, image);
  for (int i = 0; i < m; ++i) r[i] -= b[i];
  if (problem.db) store_row(image, one, m, filled, m, problem.db + from * m);
  if (problem.dA) {
    float *to = problem.dA + from * m * n;
    for (int i = 0; i < m; ++i) r[i] = -r[i], image[i] = -image[i];
    if constexpr (Kind<R>::lanes == 1) {
      for (int i = 0; i < m; ++i) {
        float *row = to + (long)i * n;
        const Lanes left = all_of<Lanes>(r[i]), other = all_of<Lanes>(image[i]);
        int j = 0;
        for (; j + WIDTH <= n; j += WIDTH)
          store_vector(left * *(const Unaligned *)(z + j) + other * *(const Unaligned *)(u + j),
                       row + j);
        for (; j < n; ++j) row[j] = (float)(r[i] * z[j] + image[i] * u[j]);
      }
    } else {
      // The copy of A is not needed any more.
      for (int i = 0; i < m; ++i) {
        R *row = A.copy ? A.copy + (long)i * n : w;
        for (int j = 0; j < n; ++j) row[j] = r[i] * z[j] + image[i] * u[j];
        if (!A.copy) store_row(row, one, (long)m * n, filled, n, to + (long)i * n);
      }
      if (A.copy) store_row(A.copy, one, (long)m * n, filled, m * n, to);
    }
  }
  return report<R>(good, from, filled, problem.failed);
}

}  // namespace
}  // namespace pmaf
