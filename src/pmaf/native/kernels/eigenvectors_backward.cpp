// Gradients of eigenvectors of real matrices.
#include "runs.hpp"
#include "three.hpp"

namespace pmaf {
namespace {

template <class F> long reduced_piece(const Backward &p, long i, int filled, Arena arena) {
  const unsigned left = differentiate_reductions<F>(p, i, filled, arena);
  long failed = 0;
  for (int slot = 0; slot < filled; ++slot)
    if (left >> slot & 1) failed += solve_complement<Medium, F>(p, i + slot, 1, arena);
  return failed;
}
template <class F> long reduced_backward(const Backward &p, int threads) {
  const double n = p.n, cost = (2 + 5.0 * p.k) * n * n;
  const int group = p.n > GROUPED ? 1 : group_of(p.batch, cost, threads);
  const long fast = numbers_of<ReducedMemory>(p.n, p.k, group);
  const long slow = numbers_of<ComplementMemory<Medium>>(p.n, p.k, p.k, false);
  return run<Backward>(p, reduced_piece<F>, group, fast > slow ? fast : slow, cost, threads);
}

template <class R, class F> long backward_three(const Backward &p, int threads) {
  return run<Backward>(p, differentiate_three<R, F>, Kind<R>::lanes, numbers_of<Three<R>>(),
                       THREE_COST, threads);
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

long either_backward(const Backward &p, int threads) {
  return p.kind % 2 ? backward<double>(p, threads) : backward<float>(p, threads);
}

}  // namespace

template <class Set> void enter_eigenvectors_backward(Kernels &kernels) {
  kernels.backward[0] = either_backward;
}
template void enter_eigenvectors_backward<PMAF_SET>(Kernels &);

}  // namespace pmaf
