// Least squares on the unit sphere, of float.
#include "less.hpp"
#include "jobs.hpp"

namespace pmaf {
namespace {

// Entries up to which twice as many matrices as there are lanes are differentiated at a time.
constexpr int SHARED = 256;

template <class S> long least_squares_by(const LeastSquares &p, int threads) {
  const double q = p.m < p.n ? p.m : p.n, cost = 0.5 * p.m * q * p.n + q * q * q + 100 * q;
  return run<LeastSquares>(p, find_minimum<S>, Kind<typename S::Number>::lanes,
                           numbers_of<MinimumMemory<S>>(p.m, p.n), cost, threads);
}
template <class S> long least_squares_backward_by(const LeastSquaresBackward &p, int threads) {
  const double q = p.m < p.n ? p.m : p.n, products = 4.0 * p.m * p.n;
  const double cost = products + (p.kept ? 5 * q * q : 0.5 * p.m * q * p.n + q * q * q / 4);
  return run<LeastSquaresBackward>(p, differentiate_minimum<S>, Kind<typename S::Number>::lanes,
                                   numbers_of<DifferentialMemories<S>>(p.m, p.n), cost, threads);
}

long least_squares(const LeastSquares &p, int threads) {
  if (p.m > TINY && p.n > TINY) return least_squares_by<Medium>(p, threads);
  if (p.batch < 3) return least_squares_by<Tiny<0, double>>(p, threads);
  return least_squares_by<Tiny<0, Twins>>(p, threads);
}
long least_squares_backward(const LeastSquaresBackward &p, int threads) {
  if (p.m > TINY && p.n > TINY) return least_squares_backward_by<Medium>(p, threads);
  if (p.batch < 3) return least_squares_backward_by<Tiny<0, double>>(p, threads);
  // The copies of larger ones do not fit into the cache.
  return p.m * p.n <= SHARED ? least_squares_backward_by<Tiny<0, Twins>>(p, threads)
                             : least_squares_backward_by<Tiny<0, Lanes>>(p, threads);
}

// The reduction takes at most about as much memory as A. Of tiny matrices, AᵀA or AAᵀ is kept if it takes
// at most half of that.
long minimum_numbers(int m, int n) {
  const long p = m < n ? m : n, q = m < n ? n : m;
  return p > TINY ? Reduction::numbers((int)p, 1) : 4 * p <= q ? p * p : 0;
}

}  // namespace

template <class Set> void enter_less(Kernels &kernels) {
  kernels.least_squares = least_squares;
  kernels.least_squares_backward = least_squares_backward;
  kernels.minimum_numbers = minimum_numbers;
}
template void enter_less<PMAF_SET>(Kernels &);

}  // namespace pmaf
