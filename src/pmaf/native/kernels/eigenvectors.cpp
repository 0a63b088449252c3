// Eigenvectors of real matrices.
#include "runs.hpp"
#include "three.hpp"

namespace pmaf {
namespace {

template <class R, class F> long forward_three(const Forward &p, int threads) {
  return run<Forward>(p, find_three<R, F>, Kind<R>::lanes, numbers_of<Three<R>>(), THREE_COST,
                      threads);
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

long either_forward(const Forward &p, int threads) {
  return p.kind % 2 ? forward<double>(p, threads) : forward<float>(p, threads);
}

long reduction_numbers(int n, int k) { return n > TINY ? Reduction::numbers(n, k) : 0; }

}  // namespace

template <class Set> void enter_eigenvectors(Kernels &kernels) {
  kernels.forward[0] = either_forward;
  kernels.reduction_numbers = reduction_numbers;
}
template void enter_eigenvectors<PMAF_SET>(Kernels &);

}  // namespace pmaf
