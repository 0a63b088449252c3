// Memory of a thread, taken piece by piece.
//
// A kernel names its pieces in the constructor of a structure, which runs twice: with an arena without
// memory, which counts how much is needed, and with one that has it. So size and division cannot differ.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace pmaf {
namespace {

class Arena {
 public:
  explicit Arena(double *start = nullptr) : start(start) {}

  // Memory for so many numbers, or vectors of numbers; each piece is aligned for every vector.
  template <class T> T *take(long many) {
    const long bytes = many * (long)sizeof(T), rounded = (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
    char *piece = (char *)start + used;
    used += rounded + GUARD;
    if (!start) return nullptr;
#if defined(__SANITIZE_ADDRESS__)
    // What is behind a piece belongs to nobody.
    __asan_unpoison_memory_region(piece, (size_t)bytes);
    __asan_poison_memory_region(piece + bytes, (size_t)(rounded + GUARD - bytes));
#endif
    return (T *)piece;
  }
  // How many numbers of double precision have been taken.
  long numbers() const { return used / (long)sizeof(double); }

 private:
  static constexpr long ALIGNED = 64;  // bytes of the longest vector
#if defined(__SANITIZE_ADDRESS__)
  static constexpr long GUARD = ALIGNED;
#else
  static constexpr long GUARD = 0;
#endif

  double *start;
  long used = 0;  // bytes
};

// How many numbers a structure takes whose constructor is given an arena and these.
template <class Pieces, class... Sizes> inline long numbers_of(Sizes... sizes) {
  Arena arena;
  const Pieces pieces(arena, sizes...);
  return arena.numbers();
}

}  // namespace
}  // namespace pmaf
