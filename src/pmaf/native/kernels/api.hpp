// What the kernels are given, and how the library finds those for the processor.
//
// Python packs these structures (`native/__init__.py`): addresses and the number of threads, which
// differ from call to call, come first, sizes and options follow. Numbers are of `kind` 0 for float,
// 1 for double, 2 and 3 for complex numbers of these.
#pragma once

#include <cstdint>

namespace pmaf {

// Largest eigenpairs of ½(A + Aᴴ), or of its negative; or those of a pair, Ay = λMy with yᴴMy = 1, for
// which C = T⁻¹AT⁻ᴴ with M = TTᴴ has the same eigenvalues, and vectors x = Tᴴy.
struct Forward {
  const void *A, *M;  // (batch, n, n); M is null for one matrix
  void *values, *vectors;  // (batch, k), (batch, k, n)
  double *matrix, *factor, *x;  // of a pair: C, the factor of M, (batch, n, n), and (batch, k, n)
  double *reduction;       // of one matrix: (batch, reduction_numbers(n, k)), or null
  uint8_t *failed;         // (batch), or null
  long threads;
  long batch;
  int n, k, kind;
  double sign;             // −1 for the smallest eigenvalues
  const double *second;    // (n), decides signs where the sum of a vector is zero
  double tolerance;        // up to which a sum counts as zero
  double definite;         // the least pivot of M, relative to its diagonal
  double refined;  // the largest residual of a pair of double precision, relative to its terms
};

// The gradient of A, given those of the vectors and of the values; or the solutions of the linear
// systems alone, where shifts are given. Of a pair, the gradients of both matrices.
struct Backward {
  const void *A, *y;       // (batch, n, n), (batch, k, n); of a pair null
  const double *matrix, *factor, *x;  // what the forward pass of a pair has returned
  const double *reduction;            // what that of one matrix has returned, or null
  const void *v;           // (batch, rows, n), or null
  const void *shift;       // (batch, rows), or null for a gradient, which has k rows
  const void *d_values;    // (batch, k), or null
  void *result;            // the gradient (batch, n, n), or null, or the solutions (batch, rows, n)
  void *d_metric;          // the gradient of M, or null
  uint8_t *failed;         // (batch), or null
  long threads;
  long batch;
  int n, k, rows, kind;
  double sign;
  double equal;            // relative distance up to which eigenvalues count as one
};

// Least squares on the unit sphere, of float: min ½‖Au − b‖² subject to ‖u‖ = 1.
struct LeastSquares {
  const float *A, *b;  // (batch, m, n), (batch, m)
  float *u;                 // (batch, n)
  double *multiplier, *gap;  // (batch)
  double *kept;              // (batch, minimum_numbers(m, n)), for the backward pass, or null
  uint8_t *failed;          // (batch), or null
  long threads;
  long batch;
  int m, n;
  const double *second;     // (n), decides signs where the sum of a vector is zero
};

// The gradients of A and b, given those of u.
struct LeastSquaresBackward {
  const float *A, *b, *u, *v;  // v is the gradient of u
  const double *multiplier;  // (batch)
  const double *kept;        // what the forward pass has kept, or null
  float *dA, *db;   // either may be null
  uint8_t *failed;  // (batch), or null
  long threads;
  long batch;
  int m, n;
};

// Least squares on the unit sphere, or in the unit ball, of double, from a decomposition; many problems may
// share one matrix.
struct UnitForward {
  const double *A, *b;              // (batch, m, n), or (m, n) if it is shared; (batch, m)
  const double *start;              // (batch, n), or null
  const double *values, *vectors;   // see `Squares` in basis.hpp; of each matrix
  double *u, *multiplier, *residual, *gap;  // (batch, n), (batch)
  double *rows, *spread;            // (batch, p, n), (batch, p), or of the one matrix
  int64_t *steps;                   // (batch)
  uint8_t *converged;               // (batch)
  uint8_t *failed;                  // (batch)
  long threads;
  long batch;
  int m, n, shared, ball, rooted, limit, refinements;  // see `Options` in basis.hpp
  double eps;                       // the rounding of the data
};

// The gradients of such a problem with weights, given those of u and of the multiplier.
struct UnitBackward {
  const double *A, *b, *weights;    // (batch, m, n), (batch, m), and (batch, m) or null
  const double *rows, *spread;      // what the forward pass has found, as `y`, multiplier and gap
  const double *y, *multiplier, *gap;
  const double *v, *d_multiplier;   // (batch, n), and (batch) or null
  double *dA, *d_metric, *db, *d_weights, *d_radius;  // each may be null
  uint8_t *failed;
  long threads;
  long batch;
  int m, n, shared, ball, diagonal;  // whether rows and spread are shared; whether d_metric is (batch, n)
};

// Least squares on a sphere or an ellipsoid, or in it, of `kind`, as users pose them. A first call reads
// the problems and writes the squares that LAPACK decomposes, a second one solves them; without squares one
// call does both.
struct PosedForward {
  const void *A, *b, *weights, *radius, *metric;  // metric is (batch, n, n), or its diagonal (batch, n)
  double *kept;                     // (batch, posed_numbers), for the backward pass
  double *square;                   // of a first call, (batch, p, p), or null
  const double *values, *vectors;   // of a second call, or null
  void *u;                          // (batch, n)
  uint8_t *failed;
  long threads;
  long batch;
  int m, n, kind, weighted, metric_form, ball, limit, refinements;
  double length;                    // the radius, if it is a number
  double eps;
};

// The gradients of what the user gave, given that of u.
struct PosedBackward {
  double *kept;                     // what the forward pass has kept
  const void *v;                    // (batch, n)
  void *dA, *db, *d_weights, *d_radius, *d_metric;  // each may be null
  uint8_t *failed;
  long threads;
  long batch;
  int m, n, kind, weighted, metric_form, ball;
};

// The kernels of one instruction set.
struct Kernels {
  long (*forward[2])(const Forward &, int threads);  // of real, and of complex matrices
  long (*backward[2])(const Backward &, int threads);
  long (*least_squares)(const LeastSquares &, int threads);
  long (*least_squares_backward)(const LeastSquaresBackward &, int threads);
  long (*reduction_numbers)(int n, int k);  // of one real matrix; zero if none is to be kept
  long (*minimum_numbers)(int m, int n);    // the same for least squares
  long (*unit_forward)(const UnitForward &, int threads);
  long (*unit_backward)(const UnitBackward &, int threads);
  long (*posed_forward)(const PosedForward &, int threads);
  long (*posed_backward)(const PosedBackward &, int threads);
  long (*posed_numbers)(const PosedBackward &);
};

// Each unit is compiled once for each instruction set, which PMAF_SET names, and enters its functions.
// These, too, consist of instructions of the set: they may run where the processor has it.
struct baseline;
struct avx2;
struct avx512;
template <class Set> void enter_eigenvectors(Kernels &);
template <class Set> void enter_eigenvectors_backward(Kernels &);
template <class Set> void enter_hermitian(Kernels &);
template <class Set> void enter_less(Kernels &);
template <class Set> void enter_posed(Kernels &);

// Calls body(data, i) for i from 0 to items − 1, by several threads.
void for_each(long items, int threads, void (*body)(void *, long), void *data);

// Memory of the calling thread, aligned for every vector.
double *workspace(long numbers);

}  // namespace pmaf
