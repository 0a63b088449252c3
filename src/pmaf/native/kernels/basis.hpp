// Least squares on the unit sphere or in the unit ball, from a decomposition, one problem at a time.
//
// The algorithms are those of `solvers/exact.py`, `linalg/secular.py`, `tangent/basis.py` and
// `gradients/constrained.py`, which say why they are as they are; these kernels do the same without
// the hundred short operations. Everything is in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "api.hpp"

namespace pmaf {
namespace {
namespace basis {

using Vector = std::vector<double>;

constexpr double EPS = std::numeric_limits<double>::epsilon();
constexpr double LEAST = std::numeric_limits<double>::min();
// Multiples of a rounding error, as in `linalg/roundings.py`.
constexpr double NOISE = 8, EQUAL = 8, SETTLED = 64;
// Eigenvalues of `AᵀA` below this, relative to the largest, are zero: those from `A` itself have digits
// far below EPS.
constexpr double NULL_SIZE = EQUAL * EPS * EQUAL * EPS;

inline double dot(const double *x, const double *y, int n) {
  double sums[4] = {0, 0, 0, 0};
  int i = 0;
  for (; i + 4 <= n; i += 4)
    for (int k = 0; k < 4; ++k) sums[k] += x[i + k] * y[i + k];
  for (; i < n; ++i) sums[0] += x[i] * y[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
inline double norm(const double *x, int n) { return std::sqrt(dot(x, x, n)); }
inline void add(double *x, double factor, const double *y, int n) {
  for (int i = 0; i < n; ++i) x[i] += factor * y[i];
}
inline void scale(double *x, double factor, int n) {
  for (int i = 0; i < n; ++i) x[i] *= factor;
}
inline double one_if_zero(double x) { return x == 0 ? 1 : x; }
inline bool are_finite(const double *x, long n) {
  double sum = 0;
  for (long i = 0; i < n; ++i) sum += x[i] * 0;  // zero, or nan
  return sum == 0;
}

// A matrix (m, n), by rows.
struct Matrix {
  const double *at;
  int m, n;

  const double *row(int i) const { return at + (long)i * n; }
  void times(const double *x, double *image) const {
    for (int i = 0; i < m; ++i) image[i] = dot(row(i), x, n);
  }
  void transposed_times(const double *x, double *image) const {
    std::fill(image, image + n, 0.0);
    for (int i = 0; i < m; ++i) add(image, x[i], row(i), n);
  }
};

// Eigenvectors of `AᵀA` as rows; the eigenvalues are `floor + spread`. See `linalg/gram.py`.
struct Spectrum {
  Matrix rows;  // (p, n)
  const double *spread;
  double floor = 0;

  int p() const { return rows.m; }
  bool complete() const { return rows.m == rows.n; }
  double widest() const { return *std::max_element(spread, spread + rows.m); }
};

// Solves P(H + μI)Pz = Pv, yᵀz = 0, in an eigenbasis: `TangentSolver` in `tangent/basis.py`.
class Tangent {
 public:
  Tangent(int p, int n) : y_in(p), y_low(p), inverse(p), weighted(p), v_in(p), rest(n), v_rest(n) {}

  void prepare(const Spectrum &given, double gap, const double *unit) {
    spectrum = &given, low = gap, y = unit;
    const int p = given.p(), n = given.rows.n;
    double size = 0;
    for (int i = 0; i < p; ++i) size = std::max(size, std::fabs(given.spread[i] + gap));
    const double threshold = NULL_SIZE * size;
    given.rows.times(y, y_in.data());
    int others = 0;
    q = s_yy = 0;
    for (int i = 0; i < p; ++i) {
      const double h = given.spread[i] + gap;
      const bool lowest = given.spread[i] == 0 || std::fabs(h) <= threshold;
      inverse[i] = lowest ? 0 : 1 / h;
      y_low[i] = lowest ? y_in[i] : 0;
      weighted[i] = inverse[i] * y_in[i];
      others += !lowest;
      q += y_low[i] * y_low[i];
      s_yy += weighted[i] * y_in[i];
    }
    if (!given.complete()) {
      outside(y, y_in.data(), rest.data());
      q += dot(rest.data(), rest.data(), n);
    }
    const double determinant = q + gap * s_yy;
    const bool singular = std::fabs(determinant) <= NULL_SIZE * (q + size * s_yy);
    over_d = singular ? 0 : 1 / determinant;
    fallback = singular && s_yy > 0 ? 1 / s_yy : 0;
    several = n - others > 1;
    over_q = q == 0 ? 0 : 1 / q;
    over_low = std::fabs(gap) <= threshold ? 0 : 1 / gap;
  }

  // `s` with Hs + κy = 0, yᵀs = 1; returns κ.
  double growth(double *s) {
    const int p = spectrum->p();
    for (int i = 0; i < p; ++i)
      v_in[i] = (y_low[i] + low * weighted[i]) * over_d + weighted[i] * fallback;
    spectrum->rows.transposed_times(v_in.data(), s);
    if (!spectrum->complete()) add(s, over_d, rest.data(), spectrum->rows.n);
    return -(low * over_d + fallback);
  }

  void solve(const double *v, double *z) {
    const int p = spectrum->p(), n = spectrum->rows.n;
    const bool complete = spectrum->complete();
    spectrum->rows.times(v, v_in.data());
    if (!complete) outside(v, v_in.data(), v_rest.data());
    double along = dot(y_low.data(), v_in.data(), p);
    if (!complete) along += dot(rest.data(), v_rest.data(), n);
    const double s_vy = dot(weighted.data(), v_in.data(), p), share = along * over_q;
    const double nu = (along + low * s_vy) * over_d + s_vy * fallback;
    const auto lowest = [&](double y_part, double v_part) {
      const double shared = several ? share * y_part : v_part;
      return (s_yy * shared - s_vy * y_part) * over_d + over_low * (v_part - shared);
    };
    for (int i = 0; i < p; ++i)
      v_in[i] = inverse[i] == 0 ? lowest(y_low[i], v_in[i]) : inverse[i] * (v_in[i] - nu * y_in[i]);
    spectrum->rows.transposed_times(v_in.data(), z);
    if (!complete)
      for (int j = 0; j < n; ++j) z[j] += lowest(rest[j], v_rest[j]);
    add(z, -dot(y, z, n), y, n);
  }

 private:
  // The part of a vector that the rows do not span.
  void outside(const double *x, const double *inside, double *left) const {
    const Matrix &rows = spectrum->rows;
    std::copy(x, x + rows.n, left);
    for (int i = 0; i < rows.m; ++i) add(left, -inside[i], rows.row(i), rows.n);
  }

  const Spectrum *spectrum = nullptr;
  const double *y = nullptr;
  double low = 0, q = 0, s_yy = 0, over_d = 0, fallback = 0, over_q = 0, over_low = 0;
  bool several = false;
  Vector y_in, y_low, inverse, weighted, v_in, rest, v_rest;
};

// z ← (H + μI)⁺v: `invert` in `tangent/kkt.py`. `inside` holds p numbers.
inline void invert(const Spectrum &spectrum, double gap, const double *v, double *z, double *inside) {
  const Matrix &rows = spectrum.rows;
  double size = 0;
  for (int i = 0; i < rows.m; ++i) size = std::max(size, std::fabs(spectrum.spread[i] + gap));
  const double over = spectrum.complete() || gap == 0 ? 0 : 1 / gap;
  rows.times(v, inside);
  for (int j = 0; j < rows.n; ++j) z[j] = over * v[j];
  for (int i = 0; i < rows.m; ++i) {
    const double h = spectrum.spread[i] + gap;
    const double inverse = std::fabs(h) <= NULL_SIZE * size ? 0 : 1 / h;
    add(z, inside[i] * (inverse - over), rows.row(i), rows.n);
  }
}

// What a solve is told besides the problem.
struct Options {
  bool ball;
  // Whether multiplier and gap are those of the secular equation, not those of the refined solution. Then
  // a small gap has all its digits; but one of an ellipsoid or of weights has the errors of the
  // decomposition, which are relative to the largest singular value.
  bool rooted;
  double eps;  // the rounding of the data
  int limit, refinements;
};

struct Found {
  double multiplier, residual, gap;
  long steps;
  bool converged;
};

// min ½‖Au − b‖² subject to ‖u‖ = 1, or ‖u‖ ≤ 1.
class Solver {
 public:
  Solver(int m, int n, int p)
      : tangent(p, n), inside(p), residual(m), rest(n), step(n), trial(n), trial_rest(n), near_b(m),
        near_c(p) {}

  // `c` has the coefficients of Aᵀb in the basis; `start` may be null.
  Found solve(const Matrix &A, const double *b, const Spectrum &spectrum, const double *c,
              const double *start, const Options &options, double *u) {
    const int n = A.n, far = options.ball ? 0 : far_by(spectrum, b, A.m);
    if (far > 0) {
      for (int i = 0; i < A.m; ++i) near_b[i] = std::ldexp(b[i], far);
      for (int i = 0; i < spectrum.p(); ++i) near_c[i] = std::ldexp(c[i], far);
      b = near_b.data(), c = near_c.data();
    }
    const double noise = NOISE * options.eps * std::sqrt(spectrum.floor) * norm(b, A.m);
    Root root = secular_root(spectrum, c, noise, start, options.limit, u);
    bool free = false;
    if (options.ball) {
      for (int i = 0; i < spectrum.p(); ++i) {
        const double value = spectrum.spread[i] + spectrum.floor;
        inside[i] = value == 0 ? 0 : c[i] / value;
      }
      free = norm(inside.data(), spectrum.p()) <= 1;
      if (free) spectrum.rows.transposed_times(inside.data(), u);
      root.t = free ? spectrum.floor : std::max(root.t, spectrum.floor);
    }
    Found found{free ? 0 : root.t - spectrum.floor, 0, 0, free ? 0 : root.steps, false};
    refine(A, b, spectrum, free, options, root.t, u, found);
    if (options.rooted) found.multiplier = root.t - spectrum.floor;
    if (options.ball) found.multiplier = std::max(found.multiplier, 0.0);
    found.gap = options.rooted ? root.t : found.multiplier + spectrum.floor;
    if (far > 0) {
      found.gap = std::ldexp(found.gap, -far);
      found.multiplier = found.gap - spectrum.floor;
    }
    found.converged = (free || root.finished) && found.residual <= SETTLED * options.eps;
    if (!are_finite(u, n)) found.converged = false;
    return found;
  }

 private:
  // If b is this much smaller than A, as a power of two, the solution is the last singular vector with
  // the sign of Aᵀb, and the gap is proportional to b; but squares of b may underflow. Returns by which
  // power b has to be multiplied.
  static constexpr int FAR = 200;

  static int far_by(const Spectrum &spectrum, const double *b, int m) {
    double size = 0;
    for (int i = 0; i < m; ++i) size = std::max(size, std::fabs(b[i]));
    const double top = spectrum.floor + spectrum.widest();
    return size > 0 && top > 0 ? std::ilogb(top) / 2 - std::ilogb(size) - FAR : 0;
  }

  struct Root {
    double t;
    long steps;
    bool finished;
  };

  // `secular_root` in `linalg/secular.py`.
  Root secular_root(const Spectrum &spectrum, const double *c, double noise, const double *start,
                    int limit, double *u) {
    const int p = spectrum.p(), n = spectrum.rows.n;
    const double *spread = spectrum.spread;
    double pull = 0;
    for (int i = 0; i < p; ++i)
      if (spread[i] == 0) pull += c[i] * c[i];
    pull = std::sqrt(pull);
    const bool tied = pull <= noise;
    double slack = 0;
    if (tied) {
      slack = 1;
      for (int i = 0; i < p; ++i) {
        const double part = spread[i] == 0 ? 0 : c[i] / spread[i];
        slack -= part * part;
      }
    }
    const bool hard = tied && slack > 0;
    double t = std::max(std::max(pull, norm(c, p) - spectrum.widest()), LEAST);
    long steps = 0;
    bool active = !hard;
    while (active && steps < limit) {
      double square = 0, slope = 0;
      for (int i = 0; i < p; ++i) {
        const double inverse = 1 / (spread[i] + t), part = c[i] * inverse;
        square += part * part;
        slope += part * part * inverse;
      }
      const double excess = std::sqrt(square) - 1, following = t + square * excess / slope;
      const bool moving = following > t;
      if (moving) t = following;
      ++steps;
      active = moving && excess > EPS;
    }
    for (int i = 0; i < p; ++i) {
      const double h = hard ? spread[i] : spread[i] + t;
      inside[i] = hard && h == 0 ? 0 : c[i] / h;
    }
    const bool finished =
        hard || (!active && std::fabs(norm(inside.data(), p) - 1) <= std::sqrt(EPS));
    if (tied && (hard || t == LEAST)) t = 0;
    spectrum.rows.transposed_times(inside.data(), u);
    if (hard) {
      lowest_direction(spectrum, start);
      add(u, std::sqrt(slack), step.data(), n);
    }
    scale(u, 1 / norm(u, n), n);
    return {t, steps, finished};
  }

  // A unit vector of the smallest eigenspace that does not depend on the basis, into `step`.
  void lowest_direction(const Spectrum &spectrum, const double *start) {
    const int n = spectrum.rows.n;
    double *shadow = step.data(), *reference = trial.data();
    for (int which = start ? 0 : 1; which < 3; ++which) {
      for (int j = 0; j < n; ++j)
        reference[j] = which == 0 ? start[j] : which == 1 ? 1 : std::cos(j + 1.0);
      spectrum.rows.times(reference, inside.data());
      for (int j = 0; j < n; ++j) shadow[j] = spectrum.complete() ? 0 : reference[j];
      for (int i = 0; i < spectrum.p(); ++i) {
        // Where the basis is not complete, what it spans of the reference is taken away again.
        const double kept = spectrum.spread[i] == 0 ? inside[i] : 0;
        const double amount = spectrum.complete() ? kept : kept - inside[i];
        if (amount != 0) add(shadow, amount, spectrum.rows.row(i), n);
      }
      const double length = norm(shadow, n);
      if (length > std::sqrt(EPS) * norm(reference, n)) {
        scale(shadow, 1 / length, n);
        return;
      }
    }
    std::copy(spectrum.rows.at, spectrum.rows.at + n, shadow);
  }

  // `_refined` in `solvers/exact.py`; if the root is kept, `_refine` in `solvers/secular.py`.
  void refine(const Matrix &A, const double *b, const Spectrum &spectrum, bool free,
              const Options &options, double root, double *u, Found &found) {
    const int n = A.n;
    A.transposed_times(b, step.data());
    const double size = one_if_zero(dot(A.at, A.at, A.m * n) + norm(step.data(), n));
    const auto rest_at = [&](const double *at, double multiplier, double *left) {
      A.times(at, residual.data());
      for (int i = 0; i < A.m; ++i) residual[i] = b[i] - residual[i];
      A.transposed_times(residual.data(), left);
      add(left, options.rooted ? -dot(at, left, n) : -multiplier, at, n);
      return norm(left, n) / size;
    };
    if (!free) scale(u, 1 / norm(u, n), n);
    found.residual = rest_at(u, found.multiplier, rest.data());
    for (int round = 0; round < std::min(options.refinements, ROUNDS); ++round) {
      const double gap = options.rooted ? root : found.multiplier + spectrum.floor;
      double rise = 0;
      if (free) {
        invert(spectrum, gap, rest.data(), step.data(), inside.data());
      } else {
        tangent.prepare(spectrum, gap, u);
        tangent.solve(rest.data(), step.data());
        // In the hard case the multiplier is at its bound and stays there.
        if (gap != 0 && !options.rooted) {
          tangent.growth(trial.data());
          rise = dot(trial.data(), rest.data(), n);
        }
      }
      for (int j = 0; j < n; ++j) trial[j] = u[j] + step[j];
      if (!free) scale(trial.data(), 1 / norm(trial.data(), n), n);
      // Rounding must not make a definite matrix indefinite.
      const double lowest = gap > 0 ? found.multiplier - 0.5 * gap : found.multiplier;
      const double multiplier = std::max(found.multiplier + rise, lowest);
      const double after = rest_at(trial.data(), multiplier, trial_rest.data());
      // A step that does not reduce the residual comes from a singular system and is rejected.
      if (norm(step.data(), n) < 0.5 && after <= std::max(found.residual, NOISE * EPS)) {
        std::copy(trial.begin(), trial.end(), u);
        std::swap(rest, trial_rest);
        found.multiplier = multiplier, found.residual = after;
      }
    }
  }

  // The decomposition has most digits, so that a second step corrects what rounding left of the first.
  static constexpr int ROUNDS = 2;

  Tangent tangent;
  Vector inside, residual, rest, step, trial, trial_rest, near_b, near_c;
};

// The gradients of a unit problem: `constrained_gradients` in `gradients/constrained.py`.
//
// The gradient of A is a sum of products left·rightᵀ; that of M is the symmetric part of pull·yᵀ.
class Differential {
 public:
  struct Term {
    Vector left, right;
  };

  Differential(int m, int n, int p)
      : terms(4, Term{Vector(m), Vector(n)}), db(m), d_weights(m), pull(n), tangent(p, n), inside(p),
        r(m), moved(m), image(m), z(n), s(n), right(n), rest(n), step(n) {}

  int count = 0;  // of terms
  double nu = 0;
  std::vector<Term> terms;
  Vector db, d_weights, pull;

  // `weights` may be null.
  void find(const Matrix &A, const double *b, const double *weights, const Spectrum &spectrum,
            const double *y, double multiplier, double gap, bool ball, const double *v,
            double d_multiplier) {
    const int m = A.m, n = A.n;
    const bool acts =
        !ball || multiplier > 0 || (norm(y, n) >= 1 - NOISE * EPS && gap != 0);
    const auto weighted = [&](int i) { return weights ? weights[i] : 1.0; };
    // left ← AᵀWAx
    const auto product = [&](const double *x, double *left) {
      A.times(x, image.data());
      for (int i = 0; i < m; ++i) image[i] *= weighted(i);
      A.transposed_times(image.data(), left);
    };
    const auto solve = [&](const double *given, double *found) {
      if (acts) tangent.solve(given, found);
      else invert(spectrum, gap, given, found, inside.data());
    };
    // A step of refinement, since the basis has rounding errors relative to the largest eigenvalue.
    const auto corrected = [&](const double *given, double *found) {
      product(found, rest.data());
      for (int j = 0; j < n; ++j) rest[j] = given[j] - rest[j] - multiplier * found[j];
      solve(rest.data(), step.data());
      add(found, 1, step.data(), n);
    };
    if (acts) tangent.prepare(spectrum, gap, y);
    solve(v, z.data());
    corrected(v, z.data());
    nu = 0;
    if (acts) {
      const double kappa = tangent.growth(s.data());
      for (int j = 0; j < n; ++j) right[j] = -kappa * y[j];
      corrected(right.data(), s.data());
      nu = dot(s.data(), v, n) + d_multiplier * kappa;
      add(z.data(), d_multiplier, s.data(), n);
    }
    A.times(y, r.data());
    A.times(z.data(), moved.data());
    const double shift = acts ? multiplier : 0;
    for (int i = 0; i < m; ++i) {
      r[i] -= b[i];
      db[i] = weighted(i) * moved[i];
      d_weights[i] = -r[i] * moved[i];
      terms[0].left[i] = -weighted(i) * r[i];
      terms[1].left[i] = -db[i];
    }
    for (int j = 0; j < n; ++j) {
      pull[j] = -shift * z[j] - 0.5 * nu * y[j];
      terms[0].right[j] = z[j];
      terms[1].right[j] = y[j];
    }
    count = 2;
    if (acts || gap != 0) return;
    // Of several minimisers the one of least norm is taken, which has no part in the null space.
    double *null = terms[3].right.data(), *inner = terms[2].right.data();
    product(z.data(), null);
    for (int j = 0; j < n; ++j) null[j] = v[j] - null[j];
    solve(y, inner);
    corrected(y, inner);
    A.times(null, terms[2].left.data());
    A.times(inner, terms[3].left.data());
    for (int i = 0; i < m; ++i) {
      d_weights[i] += terms[2].left[i] * terms[3].left[i];
      terms[2].left[i] *= weighted(i), terms[3].left[i] *= weighted(i);
    }
    add(pull.data(), -1, null, n);
    count = 4;
  }

 private:
  Tangent tangent;
  Vector inside, r, moved, image, z, s, right, rest, step;
};

// Eigenvalues of `AᵀA` or `AAᵀ`, whichever is smaller, in ascending order, and eigenvectors as rows (p, p);
// both are null if LAPACK was not asked.
struct Squares {
  const double *values, *vectors;
};

// The spectrum of AᵀA and the coefficients of Aᵀb, as in `linalg/gram.py`.
//
// Squares of numbers that float32 holds have all their digits. Squares of other numbers do not, so that the
// eigenvectors are where Jacobi's rotations begin, which make the images `Avᵢ` orthogonal: these have the
// digits of A itself. Where the squares are well conditioned no rotation is needed.
class Decomposer {
 public:
  Decomposer(int m, int n)
      : p(std::min(m, n)), q(std::max(m, n)), images((long)p * q), turned((long)p * p), s(p),
        squares(p), g(n), order(p) {}

  // Writes `rows` (p, n), `spread` and `c` (p), and returns the smallest eigenvalue.
  double spectrum(const Matrix &A, const double *b, const Squares &given, double eps, double *rows,
                  double *spread, double *c) {
    const bool tall = A.m >= A.n, exact = given.values && eps > EPS;
    if (exact) take(A, b, given, EQUAL * eps, rows, c);
    else rotate(A, b, given.vectors, EQUAL * eps, rows, c);
    const double low = tall ? s[0] : 0, lowest = tall ? squares[0] : 0, top = s[p - 1];
    for (int i = 0; i < p; ++i) {
      const bool merged = tall && !(s[i] - low > EQUAL * eps * top);
      spread[i] = merged ? 0 : exact ? squares[i] - lowest : (s[i] - low) * (s[i] + low);
    }
    return lowest;
  }

 private:
  // Singular values that are rounding mean zero, and so do their squares.
  void clear(double tolerance) {
    for (int i = 0; i < p; ++i)
      if (!(s[i] > tolerance * s[p - 1])) s[i] = squares[i] = 0;
  }

  void take(const Matrix &A, const double *b, const Squares &given, double tolerance, double *rows,
            double *c) {
    const int m = A.m, n = A.n;
    for (int i = 0; i < p; ++i) {
      squares[i] = given.values[i];
      s[i] = std::sqrt(std::max(squares[i], 0.0));
    }
    clear(tolerance);
    if (m >= n) {
      A.transposed_times(b, g.data());
      std::copy(given.vectors, given.vectors + (long)p * n, rows);
      // Aᵀb has no part along a singular vector whose singular value is zero.
      for (int i = 0; i < p; ++i) c[i] = s[i] > 0 ? dot(rows + (long)i * n, g.data(), n) : 0;
      return;
    }
    for (int i = 0; i < p; ++i) {
      const double *left = given.vectors + (long)i * p;
      A.transposed_times(left, rows + (long)i * n);
      scale(rows + (long)i * n, s[i] > 0 ? 1 / s[i] : 0, n);
      c[i] = s[i] * dot(left, b, m);
    }
  }

  void rotate(const Matrix &A, const double *b, const double *vectors, double tolerance, double *rows,
              double *c) {
    const int n = A.n;
    const bool tall = A.m >= n;
    if (vectors) std::copy(vectors, vectors + (long)p * p, turned.begin());
    for (int i = 0; i < p; ++i) {
      if (!vectors)
        for (int j = 0; j < p; ++j) turned[(long)i * p + j] = i == j;
      if (tall) A.times(turn(i), image(i));
      else A.transposed_times(turn(i), image(i));
    }
    make_orthogonal();
    for (int i = 0; i < p; ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int i, int j) { return squares[i] < squares[j]; });
    for (int i = 0; i < p; ++i) s[i] = std::sqrt(squares[order[i]]);
    for (int i = 0; i < p; ++i) squares[i] = s[i] * s[i];
    clear(tolerance);
    for (int i = 0; i < p; ++i) {
      const int k = order[i];
      double *row = rows + (long)i * n;
      if (tall) {
        std::copy(turn(k), turn(k) + n, row);
        c[i] = s[i] > 0 ? dot(image(k), b, A.m) : 0;
      } else {
        std::copy(image(k), image(k) + n, row);
        scale(row, s[i] > 0 ? 1 / s[i] : 0, n);
        c[i] = s[i] * dot(turn(k), b, A.m);
      }
    }
  }

  // One-sided rotations of Jacobi, which converge quadratically.
  void make_orthogonal() {
    const double rounding = EPS * std::sqrt((double)q);
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
      double top = 0;
      for (int i = 0; i < p; ++i) {
        squares[i] = dot(image(i), image(i), q);
        top = std::max(top, squares[i]);
      }
      bool rotated = false;
      for (int i = 0; i < p; ++i)
        for (int j = i + 1; j < p; ++j) {
          const double product = dot(image(i), image(j), q), size = std::fabs(product);
          if (size <= rounding * std::sqrt(squares[i] * squares[j]) || size <= EPS * EPS * top) continue;
          const double cot = (squares[j] - squares[i]) / (2 * product);
          const double tangent =
              (cot < 0 ? -1 : 1) / (std::fabs(cot) + std::sqrt(1 + cot * cot));
          const double cosine = 1 / std::sqrt(1 + tangent * tangent), sine = cosine * tangent;
          turn_pair(image(i), image(j), q, cosine, sine);
          turn_pair(turn(i), turn(j), p, cosine, sine);
          squares[i] -= tangent * product;
          squares[j] += tangent * product;
          rotated = true;
        }
      if (!rotated) return;
    }
    for (int i = 0; i < p; ++i) squares[i] = dot(image(i), image(i), q);
  }
  static void turn_pair(double *x, double *y, int n, double cosine, double sine) {
    for (int i = 0; i < n; ++i) {
      const double before = x[i];
      x[i] = cosine * before - sine * y[i];
      y[i] = sine * before + cosine * y[i];
    }
  }
  double *image(int i) { return images.data() + (long)i * q; }
  double *turn(int i) { return turned.data() + (long)i * p; }

  static constexpr int SWEEPS = 30;  // six are many

  const int p, q;
  Vector images, turned, s, squares, g;
  std::vector<int> order;
};

// Problems in the units of the solver, as `solvers/exact.py` has them.

// Calls body(first, last) for pieces of the batch, and returns the sum of what it returns.
template <class Body> long in_pieces(long batch, double cost, int threads, const Body &body) {
  // About so many multiplications make a piece; to wake another thread takes as long as WAKING.
  constexpr double PIECE = 2e5, WAKING = 1e6;
  struct Job {
    const Body &body;
    long batch, many, failed;
  };
  const long many = std::max(1L, (long)(PIECE / cost));
  Job job{body, batch, many, 0};
  for_each((batch + many - 1) / many, cost * (double)batch > WAKING ? threads : 1,
           [](void *data, long item) {
             Job &all = *(Job *)data;
             const long first = item * all.many;
             const long failed = all.body(first, std::min(all.batch, first + all.many));
             if (failed) __atomic_fetch_add(&all.failed, failed, __ATOMIC_RELAXED);
           },
           &job);
  return job.failed;
}

inline double cost_of(int m, int n) { return 30.0 * m * n + 20.0 * std::min(m, n) * n + 500; }

inline long solve_units(const UnitForward &q, int threads) {
  const int m = q.m, n = q.n, p = std::min(m, n);
  return in_pieces(q.batch, cost_of(m, n), threads, [&](long first, long last) {
    Solver solver(m, n, p);
    Decomposer decomposer(m, n);
    Vector c(p), rows((long)p * n), spread(p);
    const Options options{q.ball != 0, q.rooted != 0, q.eps, q.limit, q.refinements};
    long failed = 0;
    for (long i = first; i < last; ++i) {
      const long k = q.shared ? 0 : i;  // which matrix
      const Matrix A{q.A + k * m * n, m, n};
      const double *b = q.b + i * m;
      const Squares given{q.values ? q.values + k * p : nullptr,
                          q.vectors ? q.vectors + k * p * p : nullptr};
      const double floor =
          decomposer.spectrum(A, b, given, q.eps, rows.data(), spread.data(), c.data());
      const Spectrum spectrum{{rows.data(), p, n}, spread.data(), floor};
      const double *start = q.start ? q.start + i * n : nullptr;
      const Found found = solver.solve(A, b, spectrum, c.data(), start, options, q.u + i * n);
      if (!q.shared || i == 0) {
        std::copy(rows.begin(), rows.end(), q.rows + k * p * n);
        std::copy(spread.begin(), spread.end(), q.spread + k * p);
      }
      q.multiplier[i] = found.multiplier, q.residual[i] = found.residual, q.gap[i] = found.gap;
      q.steps[i] = found.steps, q.converged[i] = found.converged;
      q.failed[i] = !are_finite(q.u + i * n, n);
      failed += q.failed[i];
    }
    return failed;
  });
}

inline long differentiate_units(const UnitBackward &q, int threads) {
  const int m = q.m, n = q.n, p = std::min(m, n);
  return in_pieces(q.batch, cost_of(m, n), threads, [&](long first, long last) {
    Differential found(m, n, p);
    long failed = 0;
    for (long i = first; i < last; ++i) {
      const long k = q.shared ? 0 : i;
      const Matrix A{q.A + i * m * n, m, n};
      const Spectrum spectrum{{q.rows + k * p * n, p, n}, q.spread + k * p};
      const double *y = q.y + i * n;
      found.find(A, q.b + i * m, q.weights ? q.weights + i * m : nullptr, spectrum, y,
                 q.multiplier[i], q.gap[i], q.ball != 0, q.v + i * n,
                 q.d_multiplier ? q.d_multiplier[i] : 0);
      if (q.dA)
        for (int row = 0; row < m; ++row) {
          double *to = q.dA + (i * m + row) * n;
          std::fill(to, to + n, 0.0);
          for (int t = 0; t < found.count; ++t)
            add(to, found.terms[t].left[row], found.terms[t].right.data(), n);
        }
      if (q.d_metric && q.diagonal)
        for (int j = 0; j < n; ++j) q.d_metric[i * n + j] = found.pull[j] * y[j];
      else if (q.d_metric)
        for (int row = 0; row < n; ++row)
          for (int j = 0; j < n; ++j)
            q.d_metric[(i * n + row) * n + j] =
                0.5 * (found.pull[row] * y[j] + y[row] * found.pull[j]);
      if (q.db) std::copy(found.db.begin(), found.db.end(), q.db + i * m);
      if (q.d_weights) std::copy(found.d_weights.begin(), found.d_weights.end(), q.d_weights + i * m);
      if (q.d_radius) q.d_radius[i] = found.nu;
      q.failed[i] = !are_finite(found.terms[0].right.data(), n);
      failed += q.failed[i];
    }
    return failed;
  });
}

}  // namespace basis
}  // namespace
}  // namespace pmaf
