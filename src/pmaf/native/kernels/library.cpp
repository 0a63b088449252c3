// The functions that Python calls, the choice of an instruction set, and threads.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "api.hpp"

namespace pmaf {

namespace {

// An instruction set: whether the processor has it, and what enters its kernels.
struct Set {
  const char *name;
  bool (*is_there)();
  void (*enter)(Kernels &);
};

template <class Name> void enter(Kernels &kernels) {
  enter_eigenvectors<Name>(kernels);
  enter_eigenvectors_backward<Name>(kernels);
  enter_hermitian<Name>(kernels);
  enter_less<Name>(kernels);
  enter_posed<Name>(kernels);
}

#ifdef __x86_64__
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd");
}
#endif

// Those that this build holds, the best first.
const Set SETS[] = {
#ifdef PMAF_HOLDS_avx512
    {"avx512", has_avx512, enter<avx512>},
#endif
#ifdef PMAF_HOLDS_avx2
    {"avx2", has_avx2, enter<avx2>},
#endif
#ifdef PMAF_HOLDS_baseline
    {"baseline", [] { return true; }, enter<baseline>},
#endif
};

Kernels chosen;

// The runtime of OpenMP that torch has loaded, if any. Its threads go on looking for work for some
// milliseconds after each region, so that they are faster at hand than any others, and keep others
// from the cores. But a region ends only when all of them have had a turn on a core, which takes
// milliseconds beside other processes.
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

long nanoseconds() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return (long)std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

constexpr long NEVER = __LONG_MAX__;

// Nanoseconds in which this thread has had no core, up to a constant.
long without_core() {
  timespec used;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used)) return 0;
  return nanoseconds() - (used.tv_sec * 1'000'000'000L + used.tv_nsec);
}

// A thread that has lost its core for longer has lost it to another process, and for RARELY times as
// long, what led to it is avoided: so at most one part in RARELY of the time is lost, however busy the
// machine is.
constexpr long RARELY = 50, LATE = 200'000;  // nanoseconds

// A division of work into items, which any thread may take.
struct Team {
  long items;
  void (*body)(void *, long);
  void *data;
  std::atomic<long> next{0}, done{0};

  // Takes items until none is left, or until a time, and returns how many it took.
  long join(long until = NEVER) {
    long taken = 0;
    while (until == NEVER || nanoseconds() < until) {
      const long i = next++;
      if (i >= items) break;
      body(data, i);
      ++done;
      ++taken;
    }
    return taken;
  }
};

// A region of OpenMP, and whether to enter one: not for a while after one whose threads were late, or in
// which the caller lost its core, perhaps to one of them that still looks for work.
struct Region {
  static std::atomic<long> avoided_until, entered;
  static bool forked;  // such a process has none of the threads, and would wait for them for ever

  Team *team;
  std::thread::id caller = std::this_thread::get_id();
  long begin = nanoseconds(), ready = begin, taken = 0, before = without_core();

  static bool is_wise() { return !forked && nanoseconds() >= avoided_until; }

  static void enter(void *region) {
    Region &mine = *(Region *)region;
    const long taken = mine.team->join();
    if (std::this_thread::get_id() != mine.caller) return;
    mine.taken = taken;
    mine.ready = nanoseconds();
  }

  void judge() const {
    const long end = nanoseconds(), item = taken ? (ready - begin) / taken : 0;
    const long late = end - ready - 4 * item, away = without_core() - before;
    const long lost = late > away ? late : away;
    if (lost > LATE) avoided_until = end + RARELY * lost;
  }
};
std::atomic<long> Region::avoided_until{0}, Region::entered{0};
bool Region::forked = false;

// Threads that help the one that calls a kernel while those of OpenMP are late.
//
// The caller waits for items that were taken, not for threads: if none of them gets a core, it does
// everything itself. But a thread that loses its core to another process has always taken an item, and
// returns after some milliseconds. So for a while after that has happened, threads help for a short
// time only, which one that has slept gets in one piece; and if it has not got that, for a while not at
// all.
struct Helpers {
  static constexpr long SHORT = 1'000'000;  // nanoseconds
  std::atomic<long> away_until{0}, short_until{0};
  std::mutex mutex;
  std::condition_variable called;
  std::shared_ptr<Team> team;
  long calls = 0;
  int threads = 0;

  void call(const std::shared_ptr<Team> &next, int wanted) {
    if (nanoseconds() < away_until) return;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      team = next;
      ++calls;
      try {
        for (; threads < wanted; ++threads) std::thread([this] { help(); }).detach();
      } catch (const std::system_error &) {  // there are no more threads; the caller works alone
      }
    }
    called.notify_all();
  }

  void help() {
    long seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      called.wait(lock, [&] { return calls != seen; });
      seen = calls;
      const std::shared_ptr<Team> mine = team;
      lock.unlock();
      const long begin = nanoseconds(), before = without_core();
      const bool shortly = begin < short_until;
      mine->join(shortly ? begin + SHORT : NEVER);
      const long lost = without_core() - before, avoided = lost > LATE ? RARELY * lost : 0;
      if (avoided && shortly) away_until = nanoseconds() + avoided;
      if (avoided) short_until = nanoseconds() + (shortly ? 2 : 1) * avoided;
      lock.lock();
    }
  }
};

// Never deleted: its threads may be waiting when the process ends. A forked process has none of them.
Helpers *helpers = nullptr;
std::mutex making;

Helpers &all_helpers() {
  const std::lock_guard<std::mutex> lock(making);
  if (!helpers) helpers = new Helpers;
  return *helpers;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  Region::forked = true;
  helpers = nullptr;
  new (&making) std::mutex;  // another thread may have held the lock
});

struct Memory {
  double *start = nullptr;
  long numbers = 0;
  ~Memory() { std::free(start); }
};

}  // namespace

void for_each(long items, int threads, void (*body)(void *, long), void *data) {
  if (threads > items) threads = (int)items;
  if (threads <= 1) {
    for (long i = 0; i < items; ++i) body(data, i);
    return;
  }
  const auto team = std::make_shared<Team>();
  team->items = items, team->body = body, team->data = data;
  static const Parallel openmp = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (openmp && Region::is_wise()) {
    Region region{team.get()};
    ++Region::entered;
    openmp(Region::enter, &region, (unsigned)threads, 0);
    region.judge();
    return;
  }
  all_helpers().call(team, threads - 1);
  team->join();
  while (team->done < items) std::this_thread::yield();
}

double *workspace(long numbers) {
  thread_local Memory memory;
  if (memory.numbers < numbers) {
    std::free(memory.start);
    const long bytes = (numbers * (long)sizeof(double) + 63) / 64 * 64;
    memory.start = (double *)std::aligned_alloc(64, (size_t)bytes);
    memory.numbers = memory.start ? numbers : 0;
    if (!memory.start) std::abort();
  }
  return memory.start;
}

namespace {

// The types of members as Python's module `struct` names them.
template <class T> constexpr char CODE = 0;
template <class T> constexpr char CODE<T *> = 'P';
template <> constexpr char CODE<long> = 'l';
template <> constexpr char CODE<int> = 'i';
template <> constexpr char CODE<double> = 'd';

// A line with the name of a function, the type and the place of every member of its structure, and the
// size of the structure.
template <class P, class... T> std::string line_of(const char *name, T P::*... members) {
  static_assert((... && (CODE<T> != 0)));
  const P p{};
  std::string line = name;
  const auto describe = [&](char code, const void *member) {
    line += ' ' + (code + std::to_string((const char *)member - (const char *)&p));
  };
  (describe(CODE<T>, &(p.*members)), ...);
  return line + ' ' + std::to_string(sizeof(P)) + '\n';
}

std::string all_lines() {
  using F = Forward;
  using B = Backward;
  using L = LeastSquares;
  using M = LeastSquaresBackward;
  using U = UnitForward;
  using V = UnitBackward;
  using P = PosedForward;
  using Q = PosedBackward;
  return line_of("pmaf_forward", &F::A, &F::M, &F::values, &F::vectors, &F::matrix, &F::factor, &F::x,
                 &F::reduction, &F::failed, &F::threads, &F::batch, &F::n, &F::k, &F::kind, &F::sign,
                 &F::second, &F::tolerance, &F::definite, &F::refined) +
         line_of("pmaf_backward", &B::A, &B::y, &B::matrix, &B::factor, &B::x, &B::reduction, &B::v,
                 &B::shift, &B::d_values, &B::result, &B::d_metric, &B::failed, &B::threads, &B::batch,
                 &B::n, &B::k, &B::rows, &B::kind, &B::sign, &B::equal) +
         line_of("pmaf_less_forward", &L::A, &L::b, &L::u, &L::multiplier, &L::gap, &L::kept,
                 &L::failed, &L::threads, &L::batch, &L::m, &L::n, &L::second) +
         line_of("pmaf_less_backward", &M::A, &M::b, &M::u, &M::v, &M::multiplier, &M::kept, &M::dA,
                 &M::db, &M::failed, &M::threads, &M::batch, &M::m, &M::n) +
         line_of("pmaf_unit_forward", &U::A, &U::b, &U::start, &U::values, &U::vectors, &U::u,
                 &U::multiplier, &U::residual, &U::gap, &U::rows, &U::spread, &U::steps, &U::converged,
                 &U::failed, &U::threads, &U::batch, &U::m, &U::n, &U::shared, &U::ball, &U::rooted,
                 &U::limit, &U::refinements, &U::eps) +
         line_of("pmaf_unit_backward", &V::A, &V::b, &V::weights, &V::rows, &V::spread, &V::y,
                 &V::multiplier, &V::gap, &V::v, &V::d_multiplier, &V::dA, &V::d_metric, &V::db,
                 &V::d_weights, &V::d_radius, &V::failed, &V::threads, &V::batch, &V::m, &V::n,
                 &V::shared, &V::ball, &V::diagonal) +
         line_of("pmaf_posed_forward", &P::A, &P::b, &P::weights, &P::radius, &P::metric, &P::kept,
                 &P::square, &P::values, &P::vectors, &P::u, &P::failed, &P::threads, &P::batch, &P::m,
                 &P::n, &P::kind, &P::weighted, &P::metric_form, &P::ball, &P::limit, &P::refinements,
                 &P::length, &P::eps) +
         line_of("pmaf_posed_backward", &Q::kept, &Q::v, &Q::dA, &Q::db, &Q::d_weights, &Q::d_radius,
                 &Q::d_metric, &Q::failed, &Q::threads, &Q::batch, &Q::m, &Q::n, &Q::kind,
                 &Q::weighted, &Q::metric_form, &Q::ball);
}

}  // namespace
}  // namespace pmaf

#define EXPORT extern "C" __attribute__((visibility("default")))

// Changes with every change of the functions below, and of the structures that they are given.
EXPORT int pmaf_version() { return 10; }

// The structures below as lines of text. Python compares them with what it packs.
EXPORT const char *pmaf_structures() {
  static const std::string lines = pmaf::all_lines();
  return lines.c_str();
}

// The instruction sets that this build holds, the best first, with commas.
EXPORT const char *pmaf_sets() {
  static const std::string all = [] {
    std::string names;
    for (const auto &set : pmaf::SETS) names += (names.empty() ? "" : ", ") + std::string(set.name);
    return names;
  }();
  return all.c_str();
}

// Chooses the best instruction set that the processor has, or the one that is named, and returns its
// name: an empty one if there is none, in which case no other function may be called.
EXPORT const char *pmaf_choose(const char *name) {
#ifdef __x86_64__
  __builtin_cpu_init();
#endif
  for (const auto &set : pmaf::SETS)
    if ((!*name || !std::strcmp(name, set.name)) && set.is_there()) {
      set.enter(pmaf::chosen);
      return set.name;
    }
  return "";
}

// Each takes one structure: Python packs it in a fraction of the time that it takes to convert the
// arguments of a call one by one.
EXPORT long pmaf_forward(const pmaf::Forward *p) {
  return pmaf::chosen.forward[p->kind / 2](*p, (int)p->threads);
}
EXPORT long pmaf_backward(const pmaf::Backward *p) {
  return pmaf::chosen.backward[p->kind / 2](*p, (int)p->threads);
}
EXPORT long pmaf_less_forward(const pmaf::LeastSquares *p) {
  return pmaf::chosen.least_squares(*p, (int)p->threads);
}
EXPORT long pmaf_less_backward(const pmaf::LeastSquaresBackward *p) {
  return pmaf::chosen.least_squares_backward(*p, (int)p->threads);
}
EXPORT long pmaf_unit_forward(const pmaf::UnitForward *p) {
  return pmaf::chosen.unit_forward(*p, (int)p->threads);
}
EXPORT long pmaf_unit_backward(const pmaf::UnitBackward *p) {
  return pmaf::chosen.unit_backward(*p, (int)p->threads);
}
EXPORT long pmaf_posed_forward(const pmaf::PosedForward *p) {
  return pmaf::chosen.posed_forward(*p, (int)p->threads);
}
EXPORT long pmaf_posed_backward(const pmaf::PosedBackward *p) {
  return pmaf::chosen.posed_backward(*p, (int)p->threads);
}
// How many numbers the forward pass keeps of each problem of these sizes.
EXPORT long pmaf_posed_numbers(const pmaf::PosedBackward *p) {
  return pmaf::chosen.posed_numbers(*p);
}
// How many numbers of a forward pass the backward pass of k vectors wants, for each real matrix.
EXPORT long pmaf_reduction_numbers(int n, int k) {
  return pmaf::chosen.reduction_numbers(n, k);
}
// The same for the backward pass of least squares, for each matrix (m, n).
EXPORT long pmaf_minimum_numbers(int m, int n) { return pmaf::chosen.minimum_numbers(m, n); }

// Says that the process from which this one was forked has not used OpenMP: then no thread is missing.
EXPORT void pmaf_forked_early() { pmaf::Region::forked = false; }

// How many regions of OpenMP were entered, for tests.
EXPORT long pmaf_regions() { return pmaf::Region::entered; }
