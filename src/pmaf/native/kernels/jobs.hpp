// The division of a batch into pieces, which threads take one after the other.
#pragma once

#include "api.hpp"
#include "arena.hpp"
#include "simd.hpp"

namespace pmaf {
namespace {

// Up to this size the matrices of a batch go into the lanes of vectors, one in each.
constexpr int TINY = 16;

// Work is divided into pieces of about this many multiplications, whatever the number of threads.
constexpr double PIECE = 2e4;

// To wake another thread takes as long as this many multiplications.
constexpr double WAKING = 4e5;

template <class P> using Piece = long (*)(const P &, long, int, Arena);

template <class P> struct Job {
  const P *problem;
  Piece<P> piece;
  long numbers, failed, many;
  int lanes;
};

template <class P> void work(void *data, long item) {
  Job<P> &job = *(Job<P> *)data;
  const Arena arena(workspace(job.numbers));
  const long first = item * job.many, last = first + job.many;
  long failed = 0;
  for (long i = first; i < last && i < job.problem->batch; i += job.lanes) {
    const long left = job.problem->batch - i;
    failed += job.piece(*job.problem, i, left < job.lanes ? (int)left : job.lanes, arena);
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

// How many matrices are worked on together: as many as there are lanes for their tridiagonal matrices,
// if all threads have enough to do.
inline int group_of(long batch, double cost, int threads) {
  const long share = cost * batch > WAKING ? batch / (2 * threads) : batch;
  return share < 1 ? 1 : share < WIDTH ? (int)share : WIDTH;
}

// A product of complex numbers takes four multiplications.
template <class S> constexpr double work_of = S::parts * S::parts;

}  // namespace
}  // namespace pmaf
