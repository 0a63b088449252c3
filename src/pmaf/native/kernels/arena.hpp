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

// Bytes to which a piece is rounded up, and what is left free behind it.
struct Aligned {
  static constexpr long STEP = 64;  // bytes of the longest vector
#if defined(__SANITIZE_ADDRESS__)
  static constexpr long GUARD = STEP;
#else
  static constexpr long GUARD = 0;
#endif
};
// Pieces next to each other, for memory of tensors, which is kept.
struct Packed {
  static constexpr long STEP = sizeof(double), GUARD = 0;
};

template <class Spacing> class Pieces {
 public:
  explicit Pieces(double *start = nullptr) : start(start) {}

  // Memory for so many numbers, or vectors of numbers.
  template <class T> T *take(long many) {
    constexpr long STEP = Spacing::STEP, GUARD = Spacing::GUARD;
    const long bytes = many * (long)sizeof(T), rounded = (bytes + STEP - 1) / STEP * STEP;
    const long before = used;
    used += rounded + GUARD;
    if (!start) return nullptr;
    char *piece = (char *)start + before;
#if defined(__SANITIZE_ADDRESS__)
    // What is behind a piece belongs to nobody.
    if (GUARD) {
      __asan_unpoison_memory_region(piece, (size_t)bytes);
      __asan_poison_memory_region(piece + bytes, (size_t)(rounded + GUARD - bytes));
    }
#endif
    return (T *)piece;
  }
  // How many numbers of double precision have been taken.
  long numbers() const { return used / (long)sizeof(double); }

 private:
  double *start;
  long used = 0;  // bytes
};
using Arena = Pieces<Aligned>;

// How many numbers a structure takes whose constructor is given an arena and these.
template <class Memory, class... Sizes> inline long numbers_of(Sizes... sizes) {
  Arena arena;
  const Memory memory(arena, sizes...);
  return arena.numbers();
}

}  // namespace
}  // namespace pmaf
