// Declarations with which CUDA kernels are C++ for this machine's CPU: threads that run in turns and synchronize.
//
// Every thread of a block has a stack of its own. A thread runs until it waits for its block or its
// warp; the waiting threads continue when all have arrived.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __launch_bounds__(...)
#define INFINITY_F (__builtin_inff())
#define CUDART_INF_F (__builtin_inff())
typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

// ---------------------------------------------------------------- vectors

#define VECTOR(type, name)                                                                                  \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                 \
  struct name##3 { type x, y, z; };                                                                        \
  struct alignas(sizeof(type) > 4 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; };                    \
  static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                  \
  static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                       \
  static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

VECTOR(float, float)
VECTOR(int, int)
VECTOR(uint, uint)
VECTOR(char, char)
VECTOR(uchar, uchar)

typedef _Float16 half;
typedef half __half;
VECTOR(half, half)
static inline half __float2half_rn(float x) { return static_cast<half>(x); }
static inline float __half2float(half x) { return static_cast<float>(x); }
static inline half hexp(half x) { return static_cast<half>(expf(static_cast<float>(x))); }
static inline half2 __hfma2(half2 a, half2 b, half2 c) { return {half(a.x * b.x + c.x), half(a.y * b.y + c.y)}; }
static inline unsigned __pack_half2(half x, half y) {
  half both[2] = {x, y};
  unsigned packed;
  return memcpy(&packed, both, 4), packed;
}

template <typename T> static inline T max(T a, T b) { return a > b ? a : b; }
template <typename T> static inline T min(T a, T b) { return a < b ? a : b; }
#define __expf expf  // the C library has a function with this name
static inline float __int_as_float(int bits) { float x; return memcpy(&x, &bits, 4), x; }

// ---------------------------------------------------------------- threads of a block

enum { MOST_THREADS = 1024, STACK = 64 << 10, WARP = 32 };
enum State { READY, AT_BLOCK, AT_WARP, DONE };

struct Thread {
  ucontext_t context;
  State state;
  uint64_t given;
};
static Thread* threads;
static char* stacks;
static ucontext_t scheduler;
static unsigned current;
static void (*body)(void**);
static void** arguments_of_all;

static void wait(State state) {
  const unsigned self = current;
  threads[self].state = state;
  swapcontext(&threads[self].context, &scheduler);
}

static inline void __syncthreads() { wait(AT_BLOCK); }
static inline void __syncwarp(unsigned = ~0u) { wait(AT_WARP); }
static inline unsigned __activemask() { return ~0u; }

template <typename T> static T exchanged(T value, unsigned lane_in_block, bool is_there) {
  memcpy(&threads[current].given, &value, sizeof(T));
  wait(AT_WARP);
  if (is_there) memcpy(&value, &threads[lane_in_block].given, sizeof(T));
  wait(AT_WARP);
  return value;
}
template <typename T> static T __shfl_sync(unsigned, T value, int lane, int width = WARP) {
  return exchanged(value, current - current % width + lane % width, true);
}
template <typename T> static T __shfl_down_sync(unsigned, T value, unsigned by, int width = WARP) {
  return exchanged(value, current + by, current % width + by < static_cast<unsigned>(width));
}
template <typename T> static T __shfl_up_sync(unsigned, T value, unsigned by, int width = WARP) {
  return exchanged(value, current - by, current % width >= by);
}
template <typename T> static T __shfl_xor_sync(unsigned, T value, int by, int width = WARP) {
  return exchanged(value, current ^ by, (current % width ^ by) < static_cast<unsigned>(width));
}

// ---------------------------------------------------------------- tensor cores

// A warp's matrices, stored by its first thread alone: only these functions read them.
namespace nvcuda {
namespace wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

static inline bool is_first() { return current % WARP == 0; }

template <typename Use, int M, int N, int K> struct Extent;
template <int M, int N, int K> struct Extent<matrix_a, M, N, K> { enum { rows = M, columns = K }; };
template <int M, int N, int K> struct Extent<matrix_b, M, N, K> { enum { rows = K, columns = N }; };
template <int M, int N, int K> struct Extent<accumulator, M, N, K> { enum { rows = M, columns = N }; };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> class fragment {
 public:
  enum { rows = Extent<Use, M, N, K>::rows, columns = Extent<Use, M, N, K>::columns };
  typedef Layout layout;
  T& at(int row, int column) { return values_[row * columns + column]; }
  const T& at(int row, int column) const { return values_[row * columns + column]; }

 private:
  T values_[rows * columns];
};

static inline int place(row_major, int row, int column, int stride) { return row * stride + column; }
static inline int place(col_major, int row, int column, int stride) { return column * stride + row; }

// What the hardware asks for: squares begin at multiples of 32 bytes, and their rows at multiples of 16.
template <typename T> static void check_alignment(const T* square, int stride) {
  if (reinterpret_cast<uintptr_t>(square) % 32 || stride * sizeof(T) % 16) abort();
}

template <typename F, typename T> static void fill_fragment(F& into, T value) {
  if (!is_first()) return;
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j) into.at(i, j) = value;
}
template <typename F, typename T> static void load_matrix_sync(F& into, const T* from, int stride) {
  check_alignment(from, stride);
  if (!is_first()) return;
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j) into.at(i, j) = from[place(typename F::layout(), i, j, stride)];
}
template <typename F, typename T> static void store_matrix_sync(T* to, const F& from, int stride, layout_t layout) {
  check_alignment(to, stride);
  if (!is_first()) return;
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j)
      to[layout == mem_row_major ? i * stride + j : j * stride + i] = from.at(i, j);
}
template <typename D, typename A, typename B, typename C>
static void mma_sync(D& into, const A& left, const B& right, const C& more) {
  if (!is_first()) return;
  for (int i = 0; i < A::rows; ++i)
    for (int j = 0; j < B::columns; ++j) {
      float sum = more.at(i, j);
      for (int k = 0; k < A::columns; ++k) sum += static_cast<float>(left.at(i, k)) * static_cast<float>(right.at(k, j));
      into.at(i, j) = sum;
    }
}

}  // namespace wmma
}  // namespace nvcuda

// ---------------------------------------------------------------- a launch

static void enter() {
  body(arguments_of_all);
  threads[current].state = DONE;
}

static void resume(unsigned which) {
  current = which;
  threadIdx = {which % blockDim.x, which / blockDim.x % blockDim.y, which / blockDim.x / blockDim.y};
  swapcontext(&scheduler, &threads[which].context);
}

static void run_block(unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    getcontext(&threads[i].context);
    threads[i].context.uc_stack.ss_sp = stacks + static_cast<size_t>(i) * STACK;
    threads[i].context.uc_stack.ss_size = STACK;
    threads[i].context.uc_link = &scheduler;
    threads[i].state = READY;
    makecontext(&threads[i].context, enter, 0);
  }
  for (;;) {
    bool is_moving = false, is_alive = false;
    for (unsigned first = 0; first < count; first += WARP) {
      const unsigned end = min(first + WARP, count);
      bool is_waiting = true;
      while (is_waiting) {
        is_waiting = false;
        for (unsigned i = first; i < end; ++i)
          if (threads[i].state == READY) resume(i), is_moving = true;
        for (unsigned i = first; i < end; ++i)
          if (threads[i].state == AT_WARP) threads[i].state = READY, is_waiting = true;
      }
      for (unsigned i = first; i < end; ++i) is_alive |= threads[i].state != DONE;
    }
    if (!is_alive) return;
    if (!is_moving) abort();
    for (unsigned i = 0; i < count; ++i)
      if (threads[i].state == AT_BLOCK) threads[i].state = READY;
  }
}

static void launch(void (*kernel)(void**), void** arguments, const unsigned* grid, const unsigned* block, bool waits) {
  if (!threads) {
    threads = static_cast<Thread*>(calloc(MOST_THREADS, sizeof(Thread)));
    stacks = static_cast<char*>(malloc(static_cast<size_t>(MOST_THREADS) * STACK));
  }
  body = kernel;
  arguments_of_all = arguments;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  const unsigned count = block[0] * block[1] * block[2];
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        if (waits) {
          run_block(count);
          continue;
        }
        for (unsigned i = 0; i < count; ++i) {
          current = i;
          threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
          kernel(arguments);
        }
      }
}
