// Least squares with options: from a decomposition, or as users pose them.
#include "posed.hpp"

namespace pmaf {

template <class Set> void enter_posed(Kernels &kernels) {
  kernels.unit_forward = basis::solve_units;
  kernels.unit_backward = basis::differentiate_units;
  kernels.posed_forward = posed::solve;
  kernels.posed_backward = posed::differentiate;
  kernels.posed_numbers = posed::numbers;
}
template void enter_posed<PMAF_SET>(Kernels &);

}  // namespace pmaf
