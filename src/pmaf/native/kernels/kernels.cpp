// All kernels for one instruction set: compiled once for each, with PMAF_SET as its name.
#include "less.hpp"
#include "posed.hpp"
#include "three.hpp"

namespace pmaf {
namespace {

// Up to this size the matrices of a batch go into the lanes of vectors, one in each.
constexpr int TINY = 16;

// Work is divided into pieces of about this many multiplications, whatever the number of threads.
constexpr double PIECE = 2e4;

// The tridiagonal matrices of larger ones are solved one by one: their share of the time is small, and
// the memory of a group is large.
constexpr int GROUPED = 256;

// To wake another thread takes as long as this many multiplications.
constexpr double WAKING = 4e5;

template <class P> using Piece = long (*)(const P &, long, int, double *);

template <class P> struct Job {
  const P *problem;
  Piece<P> piece;
  long numbers, failed, many;
  int lanes;
};

template <class P> void work(void *data, long item) {
  Job<P> &job = *(Job<P> *)data;
  double *space = workspace(job.numbers);
  const long first = item * job.many, last = first + job.many;
  long failed = 0;
  for (long i = first; i < last && i < job.problem->batch; i += job.lanes) {
    const long left = job.problem->batch - i;
    failed += job.piece(*job.problem, i, left < job.lanes ? (int)left : job.lanes, space);
  }
  if (failed) __atomic_fetch_add(&job.failed, failed, __ATOMIC_RELAXED);
}

// `piece` solves `lanes` matrices, each of which takes `cost` multiplications, with a memory of
// `numbers`.
template <class P>
long run(const P &problem, Piece<P> piece, int lanes, long numbers, double cost, int threads) {
  long groups = (long)(PIECE / (cost * lanes));
  groups = groups < 1 ? 1 : groups;
  Job<P> job{&problem, piece, numbers, 0, groups * lanes, lanes};
  const long items = (problem.batch + job.many - 1) / job.many;
  const double all = cost * problem.batch;
  for_each(items, all > WAKING ? threads : 1, work<P>, &job);
  return job.failed;
}

template <class S, class F> long forward_piece(const Forward &p, long i, int filled, double *space) {
  return find_pairs<S, F>(p, i, filled, (typename S::Number *)space);
}
template <class S, class F>
long backward_piece(const Backward &p, long i, int filled, double *space) {
  return solve_complement<S, F>(p, i, filled, (typename S::Number *)space);
}

// How many matrices are worked on together: as many as there are lanes for their tridiagonal matrices,
// if all threads have enough to do.
int group_of(long batch, double cost, int threads) {
  const long share = cost * batch > WAKING ? batch / (2 * threads) : batch;
  return share < 1 ? 1 : share < WIDTH ? (int)share : WIDTH;
}

// A product of complex numbers takes four multiplications.
template <class S> constexpr double work_of = S::parts * S::parts;

template <class S, class F> long forward_by(const Forward &p, int threads) {
  const double n = p.n, cost = work_of<S> * (p.M ? 3 : 1) * n * n * n + 20 * n * (1 + p.k);
  int group = Kind<typename S::Number>::lanes;
  if (S::along_rows && !p.M && p.n <= GROUPED) group = group_of(p.batch, cost, threads);
  const long numbers = forward_space<S>(p.n, p.k, p.M, S::along_rows ? group : 1);
  return run<Forward>(p, forward_piece<S, F>, group, numbers * Kind<typename S::Number>::lanes, cost,
                      threads);
}
template <class S, class F> long backward_by(const Backward &p, int threads) {
  const double n = p.n, cost = work_of<S> * p.rows * (n * n * n / 4 + 8 * n * n);
  constexpr int lanes = Kind<typename S::Number>::lanes;
  return run<Backward>(p, backward_piece<S, F>, lanes,
                       backward_space<S>(p.n, p.k, p.rows, p.matrix) * lanes, cost, threads);
}
template <class F> long reduced_piece(const Backward &p, long i, int filled, double *space) {
  const unsigned left = differentiate_reductions<F>(p, i, filled, space);
  long failed = 0;
  for (int slot = 0; slot < filled; ++slot)
    if (left >> slot & 1) failed += solve_complement<Medium, F>(p, i + slot, 1, space);
  return failed;
}
template <class F> long reduced_backward(const Backward &p, int threads) {
  const double n = p.n, cost = (2 + 5.0 * p.k) * n * n;
  const int group = p.n > GROUPED ? 1 : group_of(p.batch, cost, threads);
  const long fast = reduced_space(p.n, p.k, group), slow = backward_space<Medium>(p.n, p.k, p.k, false);
  return run<Backward>(p, reduced_piece<F>, group, fast > slow ? fast : slow, cost, threads);
}

// A 3×3 matrix, one vector: the memory of a lane, and about as many multiplications.
constexpr int THREE_SPACE = 16;
constexpr double THREE_COST = 80;

template <class R, class F> long forward_three(const Forward &p, int threads) {
  const Piece<Forward> piece = [](const Forward &p, long i, int filled, double *space) {
    return find_three<R, F>(p, i, filled, (R *)space);
  };
  return run(p, piece, Kind<R>::lanes, THREE_SPACE * Kind<R>::lanes, THREE_COST, threads);
}
template <class R, class F> long backward_three(const Backward &p, int threads) {
  const Piece<Backward> piece = [](const Backward &p, long i, int filled, double *space) {
    return differentiate_three<R, F>(p, i, filled, (R *)space);
  };
  return run(p, piece, Kind<R>::lanes, THREE_SPACE * Kind<R>::lanes, THREE_COST, threads);
}

template <class F> long forward(const Forward &p, int threads) {
  if (p.n == 3 && p.k == 1 && !p.M)
    return p.batch < 3 ? forward_three<double, F>(p, threads) : forward_three<Twins, F>(p, threads);
  if (p.n > TINY) return forward_by<Medium, F>(p, threads);
  if (p.batch < 3) return forward_by<Tiny<0, double>, F>(p, threads);
  switch (p.n) {
    case 2: return forward_by<Tiny<2, Twins>, F>(p, threads);
    case 3: return forward_by<Tiny<3, Twins>, F>(p, threads);
    case 4: return forward_by<Tiny<4, Twins>, F>(p, threads);
    default: return forward_by<Tiny<0, Twins>, F>(p, threads);
  }
}
template <class F> long backward(const Backward &p, int threads) {
  if (p.n == 3 && p.k == 1 && !p.matrix && !p.shift)
    return p.batch < 3 ? backward_three<double, F>(p, threads) : backward_three<Twins, F>(p, threads);
  if (p.reduction) return reduced_backward<F>(p, threads);
  if (p.n > TINY) return backward_by<Medium, F>(p, threads);
  if (p.batch < 3) return backward_by<Tiny<0, double>, F>(p, threads);
  switch (p.n) {
    case 2: return backward_by<Tiny<2, Twins>, F>(p, threads);
    case 3: return backward_by<Tiny<3, Twins>, F>(p, threads);
    case 4: return backward_by<Tiny<4, Twins>, F>(p, threads);
    default: return backward_by<Tiny<0, Twins>, F>(p, threads);
  }
}
template <class F> long complex_forward(const Forward &p, int threads) {
  if (p.n > TINY) return forward_by<Rows<Complex<double>>, F>(p, threads);
  if (p.batch < 3) return forward_by<Tiny<0, Complex<double>>, F>(p, threads);
  return forward_by<Tiny<0, Complex<Twins>>, F>(p, threads);
}
template <class F> long complex_backward(const Backward &p, int threads) {
  if (p.n > TINY) return backward_by<Rows<Complex<double>>, F>(p, threads);
  if (p.batch < 3) return backward_by<Tiny<0, Complex<double>>, F>(p, threads);
  return backward_by<Tiny<0, Complex<Twins>>, F>(p, threads);
}

// Entries up to which twice as many matrices as there are lanes are differentiated at a time.
constexpr int SHARED = 256;

template <class S> long least_squares_by(const LeastSquares &p, int threads) {
  using R = typename S::Number;
  const double q = p.m < p.n ? p.m : p.n, cost = 0.5 * p.m * q * p.n + q * q * q + 100 * q;
  const Piece<LeastSquares> piece = [](const LeastSquares &p, long i, int filled, double *space) {
    return find_minimum<S>(p, i, filled, (R *)space);
  };
  constexpr int lanes = Kind<R>::lanes;
  return run(p, piece, lanes, less_space<S>(p.m, p.n) * lanes, cost, threads);
}
template <class S> long least_squares_backward_by(const LeastSquaresBackward &p, int threads) {
  using R = typename S::Number;
  const double q = p.m < p.n ? p.m : p.n, products = 4.0 * p.m * p.n;
  const double cost = products + (p.kept ? 5 * q * q : 0.5 * p.m * q * p.n + q * q * q / 4);
  const Piece<LeastSquaresBackward> piece = [](const LeastSquaresBackward &p, long i, int filled,
                                               double *space) {
    return differentiate_minimum<S>(p, i, filled, (R *)space);
  };
  constexpr int lanes = Kind<R>::lanes;
  return run(p, piece, lanes, less_backward_space<S>(p.m, p.n) * lanes, cost, threads);
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

long reduction_numbers(int n, int k) { return n > TINY ? Reduction::numbers(n, k) : 0; }

// The reduction takes at most about as much memory as A. Of tiny matrices, AᵀA or AAᵀ is kept if it takes
// at most half of that.
long minimum_numbers(int m, int n) {
  const long p = m < n ? m : n, q = m < n ? n : m;
  return p > TINY ? Reduction::numbers((int)p, 1) : 4 * p <= q ? p * p : 0;
}

}  // namespace

extern const Kernels PMAF_SET;
const Kernels PMAF_SET = {{forward<float>, forward<double>, complex_forward<float>,
                           complex_forward<double>},
                          {backward<float>, backward<double>, complex_backward<float>,
                           complex_backward<double>},
                          least_squares,
                          least_squares_backward,
                          reduction_numbers,
                          minimum_numbers,
                          basis::solve_units,
                          basis::differentiate_units,
                          posed::forward,
                          posed::backward,
                          posed::numbers};

}  // namespace pmaf
