// Least squares on the sphere with options, as users pose them: the units and coordinates of a solve.
//
// With the factor L of M, `u = ρL⁻ᵀw`, where w is on the unit sphere, or in the unit ball, and solves
// the problem of `AL⁻ᵀ` and `b/ρ`; entries are divided by powers of two. See `layers/constrained.py`.
// A complex problem is a real one of twice the size: an entry a + ib is a block [[a, −b], [b, a]].
#pragma once

#include "arena.hpp"
#include "basis.hpp"
#include "numbers.hpp"

namespace pmaf {
namespace {
namespace posed {

using basis::Matrix;
using basis::Vector;

// x·2^exponent, where the power itself may be out of range.
struct Power {
  double half, rest;
  explicit Power(double exponent)
      : half(std::exp2(std::floor(0.5 * exponent))),
        rest(std::exp2(exponent - std::floor(0.5 * exponent))) {}
  double operator()(double x) const { return x * half * rest; }
  void scale(double *x, long n) const {
    for (long i = 0; i < n; ++i) x[i] = (*this)(x[i]);
  }
};

inline double largest(const double *x, long n) {
  double most = 0;
  for (long i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  return most;
}
// The exponent of the power of two below a size; zero for zero.
inline double exponent_of(double size) { return size > 0 ? std::ilogb(size) : 0; }

inline void load(Source x, long n, double *to) {
  x.visit([&](const auto *from) {
    for (long i = 0; i < n; ++i) to[i] = from[i];
  });
}

// Which constraint there is, besides a radius.
enum Metric { SPHERE, ELLIPSOID, DIAGONAL };

// The sizes of a problem of real numbers.
struct Sizes {
  int m, n, p, parts;
  bool weighted;
  Metric metric;

  template <class P>
  explicit Sizes(const P &q)
      : m(q.m * (q.kind >= 2 ? 2 : 1)), n(q.n * (q.kind >= 2 ? 2 : 1)), p(std::min(m, n)),
        parts(q.kind >= 2 ? 2 : 1), weighted(q.weighted != 0), metric((Metric)q.metric_form) {}
};

// What a forward pass keeps of one problem, all in its units and coordinates.
struct Kept {
  struct Scalars {
    double multiplier, gap;
    double radius, mantissa;
    double A_power, b_power, weights_power;  // what the tensors were divided by
  };
  double *A, *b, *weights, *factor, *rows, *spread, *y;
  Scalars *own;

  Kept(Pieces<Packed> &pieces, const Sizes &s) {
    A = pieces.take<double>((long)s.m * s.n);
    b = pieces.take<double>(s.m);
    weights = pieces.take<double>(s.weighted ? s.m : 0);
    factor = pieces.take<double>(s.metric == SPHERE ? 0 : s.metric == DIAGONAL ? s.n : (long)s.n * s.n);
    rows = pieces.take<double>((long)s.p * s.n);
    spread = pieces.take<double>(s.p);
    y = pieces.take<double>(s.n);
    own = pieces.take<Scalars>(1);
  }
  static long numbers(const Sizes &s) {
    Pieces<Packed> pieces;
    const Kept kept(pieces, s);
    return pieces.numbers();
  }
  // What was kept of problem i.
  static Kept of(double *all, long i, const Sizes &s) {
    Pieces<Packed> pieces(all + i * numbers(s));
    return {pieces, s};
  }

  // x ← L⁻¹x
  void forth(double *x, const Sizes &s) const {
    if (s.metric == SPHERE) return;
    for (int i = 0; i < s.n; ++i) {
      if (s.metric == DIAGONAL) x[i] /= factor[i];
      else x[i] = (x[i] - basis::dot(factor + (long)i * s.n, x, i)) / factor[(long)i * s.n + i];
    }
  }
  // x ← L⁻ᵀx
  void back(double *x, const Sizes &s) const {
    if (s.metric == DIAGONAL) forth(x, s);
    if (s.metric != ELLIPSOID) return;
    for (int i = s.n - 1; i >= 0; --i) {
      x[i] /= factor[(long)i * s.n + i];
      basis::add(x, -x[i], factor + (long)i * s.n, i);
    }
  }
};

// The exponent of the largest ‖b‖/‖A‖ at which `AᵀA` is not yet lost in rounding of the multiplier.
constexpr double SPAN = 1.25 * 52;

// Reads problem i, and returns whether there is one: numbers that are finite, a metric that is definite,
// a radius that is positive, weights of which none is negative.
inline bool read(const PosedForward &q, long i, const Sizes &s, const Kept &kept) {
  const int m = s.m, n = s.n;
  if (s.parts == 1) {
    load(Source(q.A, q.kind) + i * m * n, (long)m * n, kept.A);
  } else {
    const Source from = Source(q.A, q.kind) + i * (m / 2) * n;
    for (int r = 0; r < m / 2; ++r)
      for (int c = 0; c < n / 2; ++c) {
        const double re = from[(long)r * n + 2 * c], im = from[(long)r * n + 2 * c + 1];
        double *block = kept.A + (long)2 * r * n + 2 * c;
        block[0] = re, block[1] = -im, block[n] = im, block[n + 1] = re;
      }
  }
  load(Source(q.b, q.kind) + i * m, m, kept.b);
  if (!basis::are_finite(kept.A, (long)m * n) || !basis::are_finite(kept.b, m)) return false;
  if (s.metric == DIAGONAL) {
    const Source from = Source(q.metric, q.kind) + i * n;
    for (int j = 0; j < n; ++j) {
      const double d = from[s.parts == 1 ? j : j / 2 * 2];  // of complex numbers, the real part
      if (!(d > 0) || !std::isfinite(d)) return false;
      kept.factor[j] = std::sqrt(d);
    }
  } else if (s.metric == ELLIPSOID) {
    const Source from = Source(q.metric, q.kind) + i * n * (n / s.parts);
    const auto entry = [&](int r, int c) -> double {
      if (s.parts == 1) return from[(long)r * n + c];
      const Source x = from + ((long)(r / 2) * n + c / 2 * 2);
      return r % 2 == c % 2 ? x[0] : r % 2 ? x[1] : -x[1];
    };
    for (int r = 0; r < n; ++r)
      for (int c = 0; c <= r; ++c) {
        double *L = kept.factor;
        const double sum = 0.5 * (entry(r, c) + entry(c, r)) -
                           basis::dot(L + (long)r * n, L + (long)c * n, c);
        if (r > c) {
          L[(long)r * n + c] = sum / L[(long)c * n + c];
        } else {
          if (!(sum > 0) || !std::isfinite(sum)) return false;
          L[(long)r * n + r] = std::sqrt(sum);
          std::fill(L + (long)r * n + r + 1, L + (long)(r + 1) * n, 0.0);
        }
      }
  }
  for (int r = 0; r < m; ++r) kept.forth(kept.A + (long)r * n, s);
  double radius = q.length;
  if (q.radius) radius = Source(q.radius, q.kind)[i];
  if (!(radius > 0) || !std::isfinite(radius)) return false;
  kept.own->radius = radius;
  const double power = exponent_of(radius);
  kept.own->mantissa = Power(-power)(radius);
  // If ‖b‖ is far above ‖A‖, it does not affect the solution, and the multiplier is proportional to it.
  const double unit = exponent_of(largest(kept.A, (long)m * n)), most = largest(kept.b, m);
  const double excess = most > 0 ? std::max(exponent_of(most) - power - unit - SPAN, 0.0) : 0;
  kept.own->A_power = -unit;
  kept.own->b_power = -(unit + excess + power);
  Power(kept.own->A_power).scale(kept.A, (long)m * n);
  for (int r = 0; r < m; ++r) kept.b[r] /= kept.own->mantissa;
  Power(kept.own->b_power).scale(kept.b, m);
  kept.own->weights_power = 0;
  if (s.weighted) {
    const Source from = Source(q.weights, q.kind) + i * (m / s.parts);
    for (int r = 0; r < m; ++r) {
      kept.weights[r] = from[r / s.parts];
      if (!(kept.weights[r] >= 0) || !std::isfinite(kept.weights[r])) return false;
    }
    kept.own->weights_power = -exponent_of(largest(kept.weights, m));
    Power(kept.own->weights_power).scale(kept.weights, m);
  }
  return basis::are_finite(kept.A, (long)m * n) && basis::are_finite(kept.b, m);
}

// √w A and √w b, as solvers take them.
struct Scaled {
  Vector numbers, side;
  Matrix A;
  const double *b;

  explicit Scaled(const Sizes &s)
      : numbers(s.weighted ? (long)s.m * s.n : 0), side(s.weighted ? s.m : 0), A{}, b(nullptr) {}
  void take(const Kept &kept, const Sizes &s) {
    A = {kept.A, s.m, s.n}, b = kept.b;
    if (!s.weighted) return;
    for (int r = 0; r < s.m; ++r) {
      const double root = std::sqrt(kept.weights[r]);
      side[r] = root * kept.b[r];
      for (int j = 0; j < s.n; ++j) numbers[(long)r * s.n + j] = root * kept.A[(long)r * s.n + j];
    }
    A.at = numbers.data(), b = side.data();
  }
};

// The smaller square of a matrix, for LAPACK.
inline void write_square(const Matrix &A, double *to) {
  if (A.m >= A.n) {
    std::fill(to, to + (long)A.n * A.n, 0.0);
    for (int r = 0; r < A.m; ++r)
      for (int i = 0; i < A.n; ++i) basis::add(to + (long)i * A.n, A.row(r)[i], A.row(r), A.n);
  } else {
    for (int i = 0; i < A.m; ++i)
      for (int j = 0; j < A.m; ++j) to[(long)i * A.m + j] = basis::dot(A.row(i), A.row(j), A.n);
  }
}

inline long solve(const PosedForward &q, int threads) {
  const Sizes s(q);
  const int m = s.m, n = s.n, p = s.p;
  const bool sphere = !q.ball && !s.weighted && s.metric == SPHERE && !q.radius;
  return basis::in_pieces(q.batch, basis::cost_of(m, n), threads, [&](long first, long last) {
    basis::Solver solver(m, n, p);
    basis::Decomposer decomposer(m, n);
    Scaled scaled(s);
    Vector c(p), u(n);
    const basis::Options options{q.ball != 0, sphere, q.eps, q.limit, q.refinements};
    long failed = 0;
    for (long i = first; i < last; ++i) {
      const Kept kept = Kept::of(q.kept, i, s);
      double *square = q.square ? q.square + i * p * p : nullptr;
      bool good = q.values || read(q, i, s, kept);
      if (good) scaled.take(kept, s);
      if (square && good) write_square(scaled.A, square);
      else if (square) std::fill(square, square + (long)p * p, 0.0);
      if (!square && good) {
        const basis::Squares given{q.values ? q.values + i * p : nullptr,
                                   q.vectors ? q.vectors + i * p * p : nullptr};
        const double floor = decomposer.spectrum(scaled.A, scaled.b, given, q.eps, kept.rows,
                                                 kept.spread, c.data());
        const basis::Spectrum spectrum{{kept.rows, p, n}, kept.spread, floor};
        const basis::Found found =
            solver.solve(scaled.A, scaled.b, spectrum, c.data(), nullptr, options, kept.y);
        kept.own->multiplier = found.multiplier, kept.own->gap = found.gap;
        good = found.converged;
        std::copy(kept.y, kept.y + n, u.begin());
        kept.back(u.data(), s);
        const Target to = Target(q.u, q.kind) + i * n;
        for (int j = 0; j < n; ++j) to.set(j, kept.own->radius * u[j]);
      }
      q.failed[i] = !good;
      failed += !good;
    }
    return failed;
  });
}

inline long differentiate(const PosedBackward &q, int threads) {
  const Sizes s(q);
  const int m = s.m, n = s.n, parts = s.parts;
  return basis::in_pieces(q.batch, basis::cost_of(m, n), threads, [&](long first, long last) {
    basis::Differential found(m, n, s.p);
    Vector v(n), y(n), whole((long)std::max(m, n) * n);
    // Half of a complex gradient is in each row of a block, and in each column.
    const auto store = [&](int rows, int columns, void *at, long i) {
      const Target to = Target(at, q.kind) + i * rows * columns / parts;
      if (parts == 1) {
        for (long k = 0; k < (long)rows * columns; ++k) to.set(k, whole[k]);
        return;
      }
      for (int r = 0; r < rows; r += 2)
        for (int c = 0; c < columns; c += 2) {
          const double *block = whole.data() + (long)r * columns + c;
          const Target entry = to + ((long)(r / 2) * columns + c);
          entry.set(0, block[0] + block[columns + 1]);
          entry.set(1, block[columns] - block[1]);
        }
    };
    long failed = 0;
    for (long i = first; i < last; ++i) {
      const Kept kept = Kept::of(q.kept, i, s);
      load(Source(q.v, q.kind) + i * n, n, v.data());
      kept.forth(v.data(), s);
      basis::scale(v.data(), kept.own->radius, n);
      const basis::Spectrum spectrum{{kept.rows, s.p, n}, kept.spread};
      found.find({kept.A, m, n}, kept.b, s.weighted ? kept.weights : nullptr, spectrum, kept.y,
                 kept.own->multiplier, kept.own->gap, q.ball != 0, v.data(), 0);
      q.failed[i] = !basis::are_finite(found.terms[0].right.data(), n);
      failed += q.failed[i];
      // The coordinates are fixed, so that gradients change them by one product with L⁻¹ on each side.
      std::copy(kept.y, kept.y + n, y.begin());
      kept.back(y.data(), s);
      for (int t = 0; t < found.count; ++t) kept.back(found.terms[t].right.data(), s);
      if (q.dA) {
        const Power power(kept.own->A_power);
        std::fill(whole.begin(), whole.end(), 0.0);
        for (int r = 0; r < m; ++r)
          for (int t = 0; t < found.count; ++t)
            basis::add(whole.data() + (long)r * n, found.terms[t].left[r], found.terms[t].right.data(),
                       n);
        power.scale(whole.data(), (long)m * n);
        store(m, n, q.dA, i);
      }
      if (q.db) {
        const Power power(kept.own->b_power);
        const Target to = Target(q.db, q.kind) + i * m;
        for (int r = 0; r < m; ++r) to.set(r, power(found.db[r]) / kept.own->mantissa);
      }
      if (q.d_weights) {
        const Power power(kept.own->weights_power);
        for (int r = 0; r < m / parts; ++r) {
          double sum = 0;
          for (int k = 0; k < parts; ++k) sum += found.d_weights[r * parts + k];
          Target(q.d_weights, q.kind).set(i * (m / parts) + r, power(sum));
        }
      }
      if (q.d_radius) Target(q.d_radius, q.kind).set(i, found.nu / kept.own->radius);
      if (q.d_metric) {
        double *pull = found.pull.data();
        kept.back(pull, s);
        if (s.metric == DIAGONAL) {
          const Target to = Target(q.d_metric, q.kind) + i * n;
          for (int j = 0; j < n; j += parts) {
            to.set(j, pull[j] * y[j]);
            if (parts == 2) to.set(j, pull[j] * y[j] + pull[j + 1] * y[j + 1]), to.set(j + 1, 0);
          }
        } else {
          for (int r = 0; r < n; ++r)
            for (int c = 0; c < n; ++c)
              whole[(long)r * n + c] = 0.5 * (pull[r] * y[c] + y[r] * pull[c]);
          store(n, n, q.d_metric, i);
        }
      }
    }
    return failed;
  });
}

inline long numbers(const PosedBackward &q) { return Kept::numbers(Sizes(q)); }

}  // namespace posed
}  // namespace
}  // namespace pmaf
