// Eigenvectors of complex matrices, and their gradients.
#include "runs.hpp"

namespace pmaf {
namespace {

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

long either_forward(const Forward &p, int threads) {
  return p.kind % 2 ? complex_forward<double>(p, threads) : complex_forward<float>(p, threads);
}
long either_backward(const Backward &p, int threads) {
  return p.kind % 2 ? complex_backward<double>(p, threads) : complex_backward<float>(p, threads);
}

}  // namespace

template <class Set> void enter_hermitian(Kernels &kernels) {
  kernels.forward[1] = either_forward;
  kernels.backward[1] = either_backward;
}
template void enter_hermitian<PMAF_SET>(Kernels &);

}  // namespace pmaf
