// The largest eigenpair of real 3×3 matrices, and its gradient, in closed form.
//
// The roots of the characteristic polynomial of B = A − ⅓tr(A)·I are 2p·cos(φ), for three angles φ. If
// det B is not negative, the largest of them is at least √3·p away from the others, otherwise the
// smallest is: its eigenvector is exact to rounding, a column of the adjugate of B − λI. What is left
// is a 2×2 problem in the plane orthogonal to it. So no eigenvalues are too close, or have to differ.
#pragma once

#include "ied.hpp"

namespace pmaf {
namespace {

template <class R> struct Vector3 {
  R x[3];
  R &operator[](int i) { return x[i]; }
  R operator[](int i) const { return x[i]; }
};
template <class R> inline R dot(const Vector3<R> &a, const Vector3<R> &b) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}
template <class R> inline Vector3<R> combine(R f, const Vector3<R> &a, R g, const Vector3<R> &b) {
  return {{f * a[0] + g * b[0], f * a[1] + g * b[1], f * a[2] + g * b[2]}};
}

// A symmetric matrix by its lower triangle: (0,0), (1,1), (2,2), (1,0), (2,0), (2,1).
template <class R> struct Symmetric3 {
  R a, b, c, d, e, f;
  Vector3<R> operator*(const Vector3<R> &x) const {
    return {{a * x[0] + d * x[1] + e * x[2], d * x[0] + b * x[1] + f * x[2],
             e * x[0] + f * x[1] + c * x[2]}};
  }
};

// 2cos(⅓arccos x) between 0 and 1, up to 1e−5, of which two of Newton's steps make 1e−21: interpolation
// at Chebyshev's points.
template <class R> inline R trisected(R x) {
  constexpr double c[] = {1.73206, 0.332858, -0.0920105, 0.0352847, -0.00819881};
  R sum = all_of<R>(c[4]);
  for (int i = 3; i >= 0; --i) sum = sum * x + all_of<R>(c[i]);
  return sum;
}

// All eigenpairs of A = unit·(mean·I + B).
template <class R> struct Decomposition3 {
  R unit, mean, size;   // `size` is the norm of A/unit
  R values[3];          // of B; the first is the largest
  Vector3<R> vectors[3];
  MaskOf<R> good;

  // `entries` are those of A, row by row.
  explicit Decomposition3(const R *entries, double sign) {
    const R one = all_of<R>(1), none = all_of<R>(0), half = all_of<R>(0.5 * sign);
    const auto part = [&](int i, int j) {
      return entries[3 * i + j] * half + entries[3 * j + i] * half;
    };
    Symmetric3<R> B{part(0, 0), part(1, 1), part(2, 2), part(1, 0), part(2, 0), part(2, 1)};
    const R largest = larger(larger(larger(size_of(B.a), size_of(B.b)),
                                    larger(size_of(B.c), size_of(B.d))),
                             larger(size_of(B.e), size_of(B.f)));
    unit = power_of_two(largest);
    const R scale = one / unit;
    B = {B.a * scale, B.b * scale, B.c * scale, B.d * scale, B.e * scale, B.f * scale};
    mean = (B.a + B.b + B.c) * all_of<R>(1.0 / 3);
    B.a -= mean, B.b -= mean, B.c -= mean;
    // Once more, because the sum has been rounded and the trace of B has to be zero.
    const R rest = (B.a + B.b + B.c) * all_of<R>(1.0 / 3);
    B.a -= rest, B.b -= rest, B.c -= rest;
    mean += rest;
    const R beside = B.d * B.d + B.e * B.e + B.f * B.f;
    const R square = (B.a * B.a + B.b * B.b + B.c * B.c) + (beside + beside);
    // A part of B that is below rounding of A may be anything.
    const R p = root(square * all_of<R>(1.0 / 6)) + all_of<R>(PIVOT), inverse = one / p;
    const Symmetric3<R> C{B.a * inverse, B.b * inverse, B.c * inverse,
                          B.d * inverse, B.e * inverse, B.f * inverse};
    const R determinant = C.a * (C.b * C.c - C.f * C.f) - C.d * (C.d * C.c - C.f * C.e) +
                          C.e * (C.d * C.f - C.b * C.e);
    const MaskOf<R> above = none <= determinant;  // the largest is the one apart
    const R twice = smaller(size_of(determinant), all_of<R>(2));
    R t = trisected(twice * all_of<R>(0.5));
    for (int step = 0; step < 2; ++step) {  // Newton's steps for t³ − 3t = |det|
      const R squared = t * t;
      t = t - ((squared - all_of<R>(3)) * t - twice) / (all_of<R>(3) * squared - all_of<R>(3));
    }
    t = choose(above, t, -t);
    const Vector3<R> apart = null_vector(C, t), image = B * apart;
    const R value = dot(apart, image);
    // A basis of the plane orthogonal to it (Duff et al., Building an orthonormal basis, revisited).
    const R s = choose(apart[2] < none, -one, one), f = -one / (s + apart[2]);
    const R g = apart[0] * apart[1] * f;
    const Vector3<R> u{{one + s * apart[0] * apart[0] * f, s * g, -(s * apart[0])}},
        w{{g, s + apart[1] * apart[1] * f, -apart[1]}};
    const Vector3<R> Bu = B * u, Bw = B * w;
    const R alpha = dot(u, Bu), beta = dot(w, Bu), gamma = dot(w, Bw);
    const R middle = all_of<R>(0.5) * (alpha + gamma), rise = all_of<R>(0.5) * (alpha - gamma);
    const R distance = root(rise * rise + beta * beta), sum = size_of(rise) + distance;
    const MaskOf<R> flat = sum == none;
    const R length = one / root(choose(flat, one, sum * sum + beta * beta));
    const R major = choose(flat, one, sum * length), minor = beta * length;
    // (major, minor) is along the larger diagonal entry.
    const MaskOf<R> first = none <= rise;
    const R c0 = choose(first, major, minor), c1 = choose(first, minor, major);
    const Vector3<R> up = combine(c0, u, c1, w), down = combine(-c1, u, c0, w);
    const R high = middle + distance, low = middle - distance;
    values[0] = choose(above, value, high);
    values[1] = choose(above, high, low);
    values[2] = choose(above, low, value);
    for (int i = 0; i < 3; ++i) {
      vectors[0][i] = choose(above, apart[i], up[i]);
      vectors[1][i] = choose(above, up[i], down[i]);
      vectors[2][i] = choose(above, down[i], apart[i]);
    }
    const R top = size_of(mean + values[0]), bottom = size_of(mean + values[2]);
    size = larger(top, bottom);
    // The vectors are orthonormal, so that with small residuals these are all eigenvalues.
    const R allowed = all_of<R>(RESIDUAL3 * EPS) * (size_of(mean) + p);
    good = either(values[1] <= values[0], values[1] - values[0] <= allowed);
    for (int j = 0; j < 2; ++j) {
      const Vector3<R> off = combine(one, B * vectors[j], -values[j], vectors[j]);
      good = both(good, dot(off, off) <= allowed * allowed);
    }
  }

  static constexpr double RESIDUAL3 = 32;

  // The unit vector that is nearest to the null space of C − tI.
  static Vector3<R> null_vector(const Symmetric3<R> &C, R t) {
    const R a = C.a - t, b = C.b - t, c = C.c - t;
    const R aa = b * c - C.f * C.f, bb = a * c - C.e * C.e, cc = a * b - C.d * C.d;
    const R ab = C.e * C.f - C.d * c, ac = C.d * C.f - C.e * b, bc = C.d * C.e - C.f * a;
    const MaskOf<R> second = size_of(aa) < size_of(bb);
    R x = choose(second, ab, aa), y = choose(second, bb, ab), z = choose(second, bc, ac);
    const MaskOf<R> third = larger(size_of(aa), size_of(bb)) < size_of(cc);
    x = choose(third, ac, x), y = choose(third, bc, y), z = choose(third, cc, z);
    const R inverse = all_of<R>(1) / root(x * x + y * y + z * z);
    return {{x * inverse, y * inverse, z * inverse}};
  }
};

// About as many multiplications as a 3×3 matrix takes.
constexpr double THREE_COST = 80;

// The memory of a matrix and of two vectors.
template <class R> struct Three {
  R *a, *y, *v;
  explicit Three(Arena &arena) : a(arena.take<R>(9)), y(arena.take<R>(3)), v(arena.take<R>(3)) {}
};

template <class R>
__attribute__((flatten)) long find_three(const Forward &p, long first, int filled, Arena arena) {
  using S = Tiny<3, R>;
  const Three<R> memory(arena);
  R *a = memory.a, *z = memory.y;
  load_row(Source(p.A, p.kind) + first * 9, 9, filled, 9, a);
  const Decomposition3<R> found(a, p.sign);
  for (int i = 0; i < 3; ++i) z[i] = found.vectors[0][i];
  MaskOf<R> good = found.good;
  orient<S>(p, all_of<R>(1), z, good, nullptr);
  const R value = (found.mean + found.values[0]) * found.unit * all_of<R>(p.sign);
  store_row(&value, all_of<R>(1), 1, filled, 1, Target(p.values, p.kind) + first);
  store_row(z, all_of<R>(1), 3, filled, 3, Target(p.vectors, p.kind) + first * 3);
  return report<R>(good, first, filled, p.failed);
}

// The gradient of A by all eigenpairs. Where the eigenvalue repeats, there is no derivative along the
// vectors of the same value, and z gets no part along them.
template <class R>
__attribute__((flatten)) long differentiate_three(const Backward &p, long first, int filled, Arena arena) {
  const R one = all_of<R>(1), none = all_of<R>(0);
  const Three<R> memory(arena);
  const auto [a, y, v] = memory;
  load_row(Source(p.A, p.kind) + first * 9, 9, filled, 9, a);
  load_row(Source(p.y, p.kind) + first * 3, 3, filled, 3, y);
  const Decomposition3<R> found(a, p.sign);
  const R equal = all_of<R>(p.equal) * choose(found.size == none, one, found.size);
  // The given vector was rounded. If the eigenvalue does not repeat, it is not needed but for its sign.
  const Vector3<R> &top = found.vectors[0];
  const R length = one / root(y[0] * y[0] + y[1] * y[1] + y[2] * y[2]);
  const MaskOf<R> simple = equal < found.values[0] - found.values[1];
  const R sign = choose(y[0] * top[0] + y[1] * top[1] + y[2] * top[2] < none, -one, one);
  Vector3<R> own, z{{none, none, none}};
  for (int i = 0; i < 3; ++i) own[i] = choose(simple, sign * top[i], length * y[i]);
  if (p.v) {
    load_row(Source(p.v, p.kind) + first * 3, 3, filled, 3, v);
    Vector3<R> incoming{{v[0], v[1], v[2]}};
    incoming = combine(one, incoming, -dot(incoming, own), own);
    for (int j = 1; j < 3; ++j) {
      const R gap = found.values[0] - found.values[j];
      const MaskOf<R> apart = equal < gap;
      const R part = choose(apart, dot(found.vectors[j], incoming) / choose(apart, gap, one), none);
      z = combine(one, z, part, found.vectors[j]);
    }
  }
  R along = none;
  if (p.d_values) load_row(Source(p.d_values, p.kind) + first, 1, filled, 1, &along);
  const R half = all_of<R>(0.5), over = all_of<R>(p.sign) / found.unit;
  z = combine(half * over, z, half * along, own);
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j <= i; ++j) a[3 * i + j] = a[3 * j + i] = z[i] * own[j] + own[i] * z[j];
  store_row(a, one, 9, filled, 9, Target(p.result, p.kind) + first * 9);
  return report<R>(found.good, first, filled, p.failed);
}

}  // namespace
}  // namespace pmaf
