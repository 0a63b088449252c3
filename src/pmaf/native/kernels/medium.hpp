// Symmetric and Hermitian matrices from about twenty rows on, one at a time, with vectors along their
// rows.
//
// An entry E is a real or a complex number. Rows consist of vectors of WIDTH entries, are aligned, and
// end in zeros; a vector of complex entries is one of real parts and one of imaginary parts. A stride
// counts real numbers. A loop over the columns from c on starts at the vector that contains c.
#pragma once

#include "tiny.hpp"

namespace pmaf {
namespace {

template <class E> struct VectorOf;
template <> struct VectorOf<double> { using Type = Lanes; };
template <> struct VectorOf<Complex<double>> { using Type = Complex<Lanes>; };
template <class E> using Vector = typename VectorOf<E>::Type;

inline int vectors_before(int column) { return column / WIDTH; }
template <class E> inline int vectors_in(int stride) { return stride / (WIDTH * PARTS<E>); }
template <class E = double> inline Vector<E> *at(double *x) { return (Vector<E> *)x; }
template <class E = double> inline const Vector<E> *at(const double *x) {
  return (const Vector<E> *)x;
}

// Where a part of entry i is.
template <class E> inline int place_of(int i, int part) {
  return PARTS<E> == 1 ? i : (i / WIDTH * 2 + part) * WIDTH + i % WIDTH;
}
template <class E> inline E entry(const double *x, int i) {
  if constexpr (PARTS<E> == 2)
    return {x[place_of<E>(i, 0)], x[place_of<E>(i, 1)]};
  else
    return x[i];
}
template <class E> inline void set_entry(double *x, int i, E value) {
  x[place_of<E>(i, 0)] = real_part(value);
  if constexpr (PARTS<E> == 2) x[place_of<E>(i, 1)] = value.im;
}
inline Lanes spread(double x) { return all_of<Lanes>(x); }
inline Complex<Lanes> spread(Complex<double> x) { return {spread(x.re), spread(x.im)}; }
template <class E> inline Vector<E> zeros() { return spread(from_real<E>(0)); }

// xᴴy
template <class E> inline E dot_from(const double *x, const double *y, int column, int stride) {
  Vector<E> sum = zeros<E>();
  for (int c = vectors_before(column); c < vectors_in<E>(stride); ++c)
    sum += conjugate(at<E>(x)[c]) * at<E>(y)[c];
  return total(sum);
}
template <class E>
inline void add_from(double *x, E factor, const double *y, int column, int stride) {
  const Vector<E> f = spread(factor);
  for (int c = vectors_before(column); c < vectors_in<E>(stride); ++c)
    at<E>(x)[c] += f * at<E>(y)[c];
}

// Subtracts vwᴴ + wvᴴ from rows j to j + ROWS − 1, and adds to `image` what the product of the matrix
// with `next` has from them.
//
// Of each row, the vector with its diagonal entry and those behind it are used. An entry behind that
// vector stands for its mirror image, too, and counts for both; the others have one of their own.
template <class E, int ROWS, bool UPDATE>
inline void pass(double *a, int stride, int j, const double *v, const double *w,
                 const double *next, double *image, double *side) {
  using V = Vector<E>;
  V vs[ROWS], ws[ROWS], ns[ROWS], sums[ROWS];
  V *rows[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    if (UPDATE) vs[r] = spread(entry<E>(v, j + r)), ws[r] = spread(entry<E>(w, j + r));
    ns[r] = spread(entry<E>(next, j + r));
    sums[r] = zeros<E>();
    rows[r] = at<E>(a + (j + r) * stride);
  }
  const int diagonal = vectors_before(j);
  for (int c = diagonal; c < vectors_in<E>(stride); ++c) {
    V sum = at<E>(image)[c];
    const V left = at<E>(next)[c];
    V vc, wc;
    if (UPDATE) vc = conjugate(at<E>(v)[c]), wc = conjugate(at<E>(w)[c]);
    for (int r = 0; r < ROWS; ++r) {
      V x = rows[r][c];
      if (UPDATE) {
        x -= vs[r] * wc + ws[r] * vc;
        rows[r][c] = x;
      }
      sum += ns[r] * conjugate(x);
      sums[r] += left * x;
    }
    at<E>(image)[c] = sum;
    if (c == diagonal)
      for (int r = 0; r < ROWS; ++r) sums[r] = zeros<E>();
  }
  // Not added to `image`: to write numbers and to read them as a vector takes long.
  for (int r = 0; r < ROWS; ++r) set_entry(side, j + r, total(sums[r]));
}

template <class E, bool UPDATE>
inline void pass_all(double *a, int n, int stride, int first, const double *v, const double *w,
                     const double *next, double *image, double *side) {
  constexpr int ROWS = (WIDTH < 4 ? WIDTH : 4) / PARTS<E>;
  for (int c = vectors_before(first); c < vectors_in<E>(stride); ++c)
    at<E>(image)[c] = at<E>(side)[c] = zeros<E>();
  int j = first;
  for (; j < n && j % ROWS; ++j) pass<E, 1, UPDATE>(a, stride, j, v, w, next, image, side);
  for (; j + ROWS <= n; j += ROWS) pass<E, ROWS, UPDATE>(a, stride, j, v, w, next, image, side);
  for (; j < n; ++j) pass<E, 1, UPDATE>(a, stride, j, v, w, next, image, side);
  for (int c = vectors_before(first); c < vectors_in<E>(stride); ++c)
    at<E>(image)[c] += at<E>(side)[c];
}

// The same for a matrix with both triangles, from the vector with column `first` on: more work, but no
// sum along a row, which takes longer for rows of few vectors.
template <class E, int ROWS, bool UPDATE>
inline void pass_square(double *a, int stride, int first, int j, const double *v, const double *w,
                        const double *next, double *image) {
  using V = Vector<E>;
  V vs[ROWS], ws[ROWS], ns[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    if (UPDATE) vs[r] = spread(entry<E>(v, j + r)), ws[r] = spread(entry<E>(w, j + r));
    ns[r] = spread(entry<E>(next, j + r));
  }
  for (int c = vectors_before(first); c < vectors_in<E>(stride); ++c) {
    V sum = at<E>(image)[c], vc, wc;
    if (UPDATE) vc = conjugate(at<E>(v)[c]), wc = conjugate(at<E>(w)[c]);
    for (int r = 0; r < ROWS; ++r) {
      V &x = at<E>(a + (j + r) * stride)[c];
      if (UPDATE) x -= vs[r] * wc + ws[r] * vc;
      sum += ns[r] * conjugate(x);
    }
    at<E>(image)[c] = sum;
  }
}

template <class E, bool UPDATE>
inline void pass_squares(double *a, int n, int stride, int first, const double *v, const double *w,
                         const double *next, double *image) {
  constexpr int ROWS = 4 / PARTS<E>;
  for (int c = vectors_before(first); c < vectors_in<E>(stride); ++c) at<E>(image)[c] = zeros<E>();
  int j = first;
  for (; j + ROWS <= n; j += ROWS)
    pass_square<E, ROWS, UPDATE>(a, stride, first, j, v, w, next, image);
  for (; j < n; ++j) pass_square<E, 1, UPDATE>(a, stride, first, j, v, w, next, image);
}

// The lower triangle of a matrix, but for the vectors on its diagonal, from the upper one.
template <class E> inline void mirror_rows(double *a, int n, int stride);

// Rows of at most so many vectors are reduced with both triangles.
constexpr int SQUARE = 10;

// The lanes of vector c that hold columns behind `column`.
inline LaneMask behind(int c, int column) {
  LaneMask lanes;
  for (int l = 0; l < WIDTH; ++l) lanes[l] = l;
  return lanes > (LaneMask{} + (int64_t)(column - c * WIDTH));
}

// Householder's reduction A = QTQᴴ of a Hermitian matrix to a real T, by the upper triangle of A and
// the vectors on its diagonal. Row i of `a` becomes the reflector I − τvvᴴ. The rank-two update of a
// step and the product of the next step are one pass over the matrix. `work` holds 5·stride numbers.
template <class E>
inline void reduce_rows(double *a, int n, int stride, double *d, double *e, E *tau, double *work) {
  using V = Vector<E>;
  double *v = work, *w = v + stride, *next = w + stride, *image = next + stride,
         *side = image + stride;
  const int vectors = vectors_in<E>(stride);
  for (int i = 0; i < 5 * stride; ++i) work[i] = 0;
  const bool square = vectors <= SQUARE;
  if (square) mirror_rows<E>(a, n, stride);
  for (int i = 0; i < n; ++i) {
    double *row = a + i * stride;
    if (i > 0) {
      const V factor = spread(entry<E>(v, i)), other = spread(entry<E>(w, i));
      for (int c = vectors_before(i); c < vectors; ++c)
        at<E>(row)[c] -= factor * conjugate(at<E>(w)[c]) + other * conjugate(at<E>(v)[c]);
    }
    d[i] = real_part(entry<E>(row, i));
    if (i + 1 >= n) break;
    if (i + UNREDUCED<E> >= n) {
      e[i] = real_part(entry<E>(row, i + 1));
      const E last = entry<E>(a + (i + 1) * stride, i + 1);
      const E change = entry<E>(v, i + 1) * conjugate(entry<E>(w, i + 1));
      d[i + 1] = real_part(last) - (i > 0 ? 2 * real_part(change) : 0);
      break;
    }
    const int begin = vectors_before(i + 1);
    // The column below the diagonal is the conjugate of the row.
    const V head = choose(behind(begin, i + 1), conjugate(at<E>(row)[begin]), zeros<E>());
    Lanes squares = square_of(head);
    for (int c = begin + 1; c < vectors; ++c) squares += square_of(at<E>(row)[c]);
    const Reflector<E> r = reflector(conjugate(entry<E>(row, i + 1)), total(squares));
    tau[i] = r.tau;
    e[i] = r.beta;
    const V scale = spread(r.scale);
    const LaneMask one = behind(begin, i) & ~behind(begin, i + 1);
    at<E>(next)[begin] = at<E>(row)[begin] =
        choose(one, spread(from_real<E>(1)), head * scale);
    for (int c = begin + 1; c < vectors; ++c)
      at<E>(next)[c] = at<E>(row)[c] = conjugate(at<E>(row)[c]) * scale;
    if (square)
      (i > 0 ? pass_squares<E, true> : pass_squares<E, false>)(a, n, stride, i + 1, v, w, next, image);
    else
      (i > 0 ? pass_all<E, true> : pass_all<E, false>)(a, n, stride, i + 1, v, w, next, image, side);
    const E along = dot_from<E>(next, image, i + 1, stride) * (conjugate(r.tau) * 0.5);
    const V t = spread(r.tau), shift = spread(along);
    for (int c = begin; c < vectors; ++c) {
      at<E>(v)[c] = at<E>(next)[c];
      at<E>(w)[c] = t * (at<E>(image)[c] - shift * at<E>(next)[c]);
    }
  }
}

// z ← Qz
template <class E>
inline void turn_rows_back(const double *a, int n, int stride, const E *tau, double *z) {
  for (int i = n - 1 - UNREDUCED<E>; i >= 0; --i) {
    const double *v = a + i * stride;
    add_from<E>(z, -(tau[i] * dot_from<E>(v, z, i + 1, stride)), v, i + 1, stride);
  }
}

// z ← Qᴴz
template <class E>
inline void turn_rows(const double *a, int n, int stride, const E *tau, double *z) {
  for (int i = 0; i + UNREDUCED<E> < n; ++i) {
    const double *v = a + i * stride;
    add_from<E>(z, -(conjugate(tau[i]) * dot_from<E>(v, z, i + 1, stride)), v, i + 1, stride);
  }
}

// Subtracts from row r, from a column on, multiples of the four rows of `b` from c on: each by its own
// factor.
template <class E>
inline void subtract_four(double *row, const E *factors, const double *b, int c, int column,
                          int stride) {
  const Vector<E> f0 = spread(factors[0]), f1 = spread(factors[1]), f2 = spread(factors[2]),
                  f3 = spread(factors[3]);
  const Vector<E> *r0 = at<E>(b + c * stride), *r1 = at<E>(b + (c + 1) * stride),
                  *r2 = at<E>(b + (c + 2) * stride), *r3 = at<E>(b + (c + 3) * stride);
  for (int l = vectors_before(column); l < vectors_in<E>(stride); ++l)
    at<E>(row)[l] -= (f0 * r0[l] + f1 * r1[l]) + (f2 * r2[l] + f3 * r3[l]);
}

// Cholesky's factorisation UᴴDU of a positive definite matrix, by its upper triangle, four rows at a
// time. The conjugate of U replaces the matrix: it has ones on its diagonal, which are stored as zeros;
// `inverse` holds 1/D. A pivot below `least`, which is rounding, is replaced by −least. Returns whether
// all pivots are positive.
template <class E>
inline bool factor_rows(double *a, int n, int stride, double *inverse, double least) {
  bool good = true;
  for (int c = 0; c < n; c += 4) {
    const int many = n - c < 4 ? n - c : 4;
    for (int t = 0; t < many; ++t) {
      double *row = a + (c + t) * stride;
      for (int s = 0; s < t; ++s) {
        const double *other = a + (c + s) * stride;
        add_from<E>(row, conjugate(entry<E>(other, c + t)) * -inverse[c + s], other, c + t, stride);
      }
      const double pivot = away_from_zero(real_part(entry<E>(row, c + t)), least);
      good = good && pivot > 0;
      inverse[c + t] = 1 / pivot;
    }
    for (int r = c + 4; r < n; ++r) {
      E factors[4];
      for (int s = 0; s < 4; ++s)
        factors[s] = conjugate(entry<E>(a + (c + s) * stride, r)) * inverse[c + s];
      subtract_four(a + r * stride, factors, a, c, r, stride);
    }
  }
  for (int c = 0; c < n; ++c) {
    double *row = a + c * stride;
    for (int l = vectors_before(c) * WIDTH; l <= c; ++l) set_entry(row, l, from_real<E>(0));
    for (int l = vectors_before(c); l < vectors_in<E>(stride); ++l)
      at<E>(row)[l] = conjugate(at<E>(row)[l]) * spread(inverse[c]);
  }
  return good;
}

// x ← U⁻ᴴx
template <class E> inline void solve_rows_lower(const double *a, int n, int stride, double *x) {
  for (int c = 0; c < n; ++c) add_from<E>(x, -entry<E>(x, c), a + c * stride, c, stride);
}

// x ← U⁻¹x
template <class E> inline void solve_rows_upper(const double *a, int n, int stride, double *x) {
  for (int c = n - 1; c >= 0; --c)
    set_entry(x, c, entry<E>(x, c) - dot_from<E>(a + c * stride, x, c, stride));
}

template <class E>
inline void solve_rows(const double *a, int n, int stride, const double *inverse, double *x) {
  solve_rows_lower<E>(a, n, stride, x);
  for (int c = 0; c < n; ++c) set_entry(x, c, entry<E>(x, c) * inverse[c]);
  solve_rows_upper<E>(a, n, stride, x);
}

// B ← U⁻ᴴB, for columns behind the diagonal alone, or for all.
template <class E>
inline void solve_all_rows(const double *factor, int n, int stride, double *b, bool all) {
  for (int c = 0; c < n; c += 4) {
    const int many = n - c < 4 ? n - c : 4;
    for (int t = 1; t < many; ++t)
      for (int s = 0; s < t; ++s)
        add_from<E>(b + (c + t) * stride, -entry<E>(factor + (c + s) * stride, c + t),
                    b + (c + s) * stride, all ? 0 : c + t, stride);
    for (int r = c + 4; r < n; ++r) {
      E factors[4];
      for (int s = 0; s < 4; ++s) factors[s] = entry<E>(factor + (c + s) * stride, r);
      subtract_four(b + r * stride, factors, b, c, all ? 0 : r, stride);
    }
  }
}

// The block of WIDTH entries in row c + y, from column r on, turned: turned[x] has the conjugates of
// column r + x.
template <class E>
inline void turn_block(const double *a, int n, int stride, int c, int r, Vector<E> *turned) {
  for (int part = 0; part < PARTS<E>; ++part) {
    Lanes block[WIDTH];
    for (int y = 0; y < WIDTH; ++y)
      block[y] = c + y < n ? at(a + (c + y) * stride)[r / WIDTH * PARTS<E> + part] : spread(0);
    transpose(block);
    for (int x = 0; x < WIDTH; ++x) ((Lanes *)(turned + x))[part] = block[x];
  }
  for (int x = 0; x < WIDTH; ++x) turned[x] = conjugate(turned[x]);
}

template <class E> inline void mirror_rows(double *a, int n, int stride) {
  Vector<E> turned[WIDTH];
  for (int r = WIDTH; r < n; r += WIDTH)
    for (int c = 0; c < r; c += WIDTH) {
      turn_block<E>(a, n, stride, c, r, turned);
      for (int x = 0; x < WIDTH && r + x < n; ++x)
        at<E>(a + (r + x) * stride)[c / WIDTH] = turned[x];
    }
}

// A ← D^(−½)U⁻ᴴAU⁻¹D^(−½), for the factor UᴴDU of another matrix: the upper triangle and the vectors
// on the diagonal, of both. `spare` holds n·stride numbers, `scales` holds stride numbers.
template <class E>
inline void congruent_rows(const double *factor, int n, int stride, const double *inverse,
                           double *a, double *spare, double *scales) {
  Vector<E> turned[WIDTH];
  mirror_rows<E>(a, n, stride);
  solve_all_rows<E>(factor, n, stride, a, true);
  for (int r = 0; r < n; r += WIDTH)
    for (int c = 0; c < n; c += WIDTH) {
      turn_block<E>(a, n, stride, c, r, turned);
      for (int x = 0; x < WIDTH && r + x < n; ++x)
        at<E>(spare + (r + x) * stride)[c / WIDTH] = turned[x];
    }
  solve_all_rows<E>(factor, n, stride, spare, false);
  for (int i = 0; i < stride; ++i) scales[i] = 0;
  for (int i = 0; i < n; ++i)
    for (int part = 0; part < PARTS<E>; ++part) scales[place_of<E>(i, part)] = root(inverse[i]);
  for (int r = 0; r < n; ++r) {
    const Lanes scale = all_of<Lanes>(root(inverse[r]));
    for (int c = vectors_before(r) * PARTS<E>; c < stride / WIDTH; ++c)
      at(a + r * stride)[c] = at(spare + r * stride)[c] * (scale * at(scales)[c]);
  }
  // Rounding has made a difference between both triangles of the vectors on the diagonal.
  for (int r = 0; r < n; ++r)
    for (int c = vectors_before(r) * WIDTH; c < r; ++c)
      set_entry(a + r * stride, c, conjugate(entry<E>(a + c * stride, r)));
}

}  // namespace
}  // namespace pmaf
