// Eigenvectors of complex matrices, and their gradients.
#include "runs.hpp"

namespace pmaf {
namespace {

long forward(const Forward &p, int threads) {
  if (p.n > TINY) return forward_by<Rows<Complex<double>>>(p, threads);
  if (p.batch < 3) return forward_by<Tiny<0, Complex<double>>>(p, threads);
  return forward_by<Tiny<0, Complex<Twins>>>(p, threads);
}
long backward(const Backward &p, int threads) {
  if (p.n > TINY) return backward_by<Rows<Complex<double>>>(p, threads);
  if (p.batch < 3) return backward_by<Tiny<0, Complex<double>>>(p, threads);
  return backward_by<Tiny<0, Complex<Twins>>>(p, threads);
}

}  // namespace

template <class Set> void enter_hermitian(Kernels &kernels) {
  kernels.forward[1] = forward;
  kernels.backward[1] = backward;
}
template void enter_hermitian<PMAF_SET>(Kernels &);

}  // namespace pmaf
