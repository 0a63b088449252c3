// Gradients of eigenvectors of real matrices.
#include "runs.hpp"
#include "three.hpp"

namespace pmaf {
namespace {

long reduced_piece(const Backward &p, long i, int filled, Arena arena) {
  const unsigned left = differentiate_reductions(p, i, filled, arena);
  long failed = 0;
  for (int slot = 0; slot < filled; ++slot)
    if (left >> slot & 1) failed += solve_complement<Medium>(p, i + slot, 1, arena);
  return failed;
}
long reduced_backward(const Backward &p, int threads) {
  const double n = p.n, cost = (2 + 5.0 * p.k) * n * n;
  const int group = p.n > GROUPED ? 1 : group_of(p.batch, cost, threads);
  const long fast = numbers_of<ReducedMemory>(p.n, p.k, group);
  const long slow = numbers_of<ComplementMemory<Medium>>(p.n, p.k, p.k, false);
  return run<Backward>(p, reduced_piece, group, fast > slow ? fast : slow, cost, threads);
}

template <class R> long backward_three(const Backward &p, int threads) {
  return run<Backward>(p, differentiate_three<R>, Kind<R>::lanes, numbers_of<Three<R>>(),
                       THREE_COST, threads);
}

long backward(const Backward &p, int threads) {
  if (p.n == 3 && p.k == 1 && !p.matrix && !p.shift)
    return p.batch < 3 ? backward_three<double>(p, threads) : backward_three<Twins>(p, threads);
  if (p.reduction) return reduced_backward(p, threads);
  if (p.n > TINY) return backward_by<Medium>(p, threads);
  if (p.batch < 3) return backward_by<Tiny<0, double>>(p, threads);
  switch (p.n) {
    case 2: return backward_by<Tiny<2, Twins>>(p, threads);
    case 3: return backward_by<Tiny<3, Twins>>(p, threads);
    case 4: return backward_by<Tiny<4, Twins>>(p, threads);
    default: return backward_by<Tiny<0, Twins>>(p, threads);
  }
}

}  // namespace

template <class Set> void enter_eigenvectors_backward(Kernels &kernels) {
  kernels.backward[0] = backward;
}
template void enter_eigenvectors_backward<PMAF_SET>(Kernels &);

}  // namespace pmaf
