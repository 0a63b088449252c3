// Numbers of users, in single or double precision.
//
// Which of them is known when a kernel runs, so that loads and stores are compiled for both, and
// nothing else is.
#pragma once

#include <type_traits>

namespace pmaf {
namespace {

constexpr int DOUBLE = 1;  // the kind of numbers that kernels have stored for themselves

template <class Void> struct Numbers {
  static constexpr bool constant = std::is_const_v<Void>;
  using Byte = std::conditional_t<constant, const char, char>;
  using Float = std::conditional_t<constant, const float, float>;
  using Double = std::conditional_t<constant, const double, double>;

  Void *start;
  bool single;

  Numbers(Void *start, int kind) : start(start), single(kind % 2 != DOUBLE) {}
  // Those from a number on.
  Numbers operator+(long many) const {
    Numbers later = *this;
    later.start = (Byte *)start + many * (long)(single ? sizeof(float) : sizeof(double));
    return later;
  }
  // Calls body(x) with their address.
  template <class Body> void visit(const Body &body) const {
    if (single)
      body((Float *)start);
    else
      body((Double *)start);
  }
  double operator[](long i) const { return single ? ((Float *)start)[i] : ((Double *)start)[i]; }
  void set(long i, double x) const {
    if (single)
      ((Float *)start)[i] = (float)x;
    else
      ((Double *)start)[i] = x;
  }
};
using Source = Numbers<const void>;
using Target = Numbers<void>;

}  // namespace
}  // namespace pmaf
