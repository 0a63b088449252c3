// Eigenvectors of real matrices.
#include "runs.hpp"
#include "three.hpp"

namespace pmaf {
namespace {

template <class R> long forward_three(const Forward &p, int threads) {
  return run<Forward>(p, find_three<R>, Kind<R>::lanes, numbers_of<Three<R>>(), THREE_COST,
                      threads);
}

long forward(const Forward &p, int threads) {
  if (p.n == 3 && p.k == 1 && !p.M)
    return p.batch < 3 ? forward_three<double>(p, threads) : forward_three<Twins>(p, threads);
  if (p.n > TINY) return forward_by<Medium>(p, threads);
  if (p.batch < 3) return forward_by<Tiny<0, double>>(p, threads);
  switch (p.n) {
    case 2: return forward_by<Tiny<2, Twins>>(p, threads);
    case 3: return forward_by<Tiny<3, Twins>>(p, threads);
    case 4: return forward_by<Tiny<4, Twins>>(p, threads);
    default: return forward_by<Tiny<0, Twins>>(p, threads);
  }
}

long reduction_numbers(int n, int k) { return n > TINY ? Reduction::numbers(n, k) : 0; }

}  // namespace

template <class Set> void enter_eigenvectors(Kernels &kernels) {
  kernels.forward[0] = forward;
  kernels.reduction_numbers = reduction_numbers;
}
template void enter_eigenvectors<PMAF_SET>(Kernels &);

}  // namespace pmaf
