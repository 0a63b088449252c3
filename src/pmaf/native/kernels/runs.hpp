// How the kernels of eigenvectors are run, for every storage of matrices.
#pragma once

#include "ied.hpp"
#include "jobs.hpp"

namespace pmaf {
namespace {

// The tridiagonal matrices of larger ones are solved one by one: their share of the time is small, and
// the memory of a group is large.
constexpr int GROUPED = 256;

template <class S> long forward_by(const Forward &p, int threads) {
  const double n = p.n, cost = work_of<S> * (p.M ? 3 : 1) * n * n * n + 20 * n * (1 + p.k);
  int group = Kind<typename S::Number>::lanes;
  if (S::along_rows && !p.M && p.n <= GROUPED) group = group_of(p.batch, cost, threads);
  const long numbers =
      numbers_of<PairsMemory<S>>(p.n, p.k, p.M != nullptr, S::along_rows ? group : 1);
  return run<Forward>(p, find_pairs<S>, group, numbers, cost, threads);
}
template <class S> long backward_by(const Backward &p, int threads) {
  const double n = p.n, cost = work_of<S> * p.rows * (n * n * n / 4 + 8 * n * n);
  const long numbers =
      numbers_of<ComplementMemory<S>>(p.n, p.k, p.rows, p.matrix != nullptr);
  return run<Backward>(p, solve_complement<S>, Kind<typename S::Number>::lanes, numbers, cost,
                       threads);
}

}  // namespace
}  // namespace pmaf
