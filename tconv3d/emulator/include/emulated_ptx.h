// The functions of device/ptx.cuh in plain C++ for the emulator, with the same names and results.
#pragma once

#include <cstdint>
#include <cstring>

namespace tconv3d::ptx {

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float half_to_float(unsigned short bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -subnormal : subnormal;
}

// Rounds to nearest even, as cvt.rn does.
inline unsigned short float_to_half(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFFu;
  if (magnitude >= 0x47800000u) return static_cast<unsigned short>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 aligns the subnormal half's last place with the float's.
    const std::uint32_t aligned = float_to_bits(bits_to_float(magnitude) + 0.5f);
    return static_cast<unsigned short>(sign | (aligned - 0x3F000000u));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<unsigned short>(sign | ((magnitude + 0xFFFu + odd - 0x38000000u) >> 13));
}

inline unsigned short float_to_bfloat16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
  return static_cast<unsigned short>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline unsigned floats_to_halves(float first, float second) {
  return float_to_half(first) | static_cast<unsigned>(float_to_half(second)) << 16;
}

inline unsigned floats_to_bfloat16s(float first, float second) {
  return float_to_bfloat16(first) | static_cast<unsigned>(float_to_bfloat16(second)) << 16;
}

inline float max_or_nan(float a, float b) {
  if (a != a || b != b) return bits_to_float(0x7FFFFFFFu);
  return a > b ? a : b;
}
inline float min_or_nan(float a, float b) {
  if (a != a || b != b) return bits_to_float(0x7FFFFFFFu);
  return a < b ? a : b;
}

inline float power_of_two(float x) {
  const float power = __builtin_exp2f(x);
  return power < 0x1p-126f ? 0.0f : power;
}

inline void add_keeping_rest(float& total, float& term, float scale) {
  const float most = 0x1p104f, sum = __builtin_fmaf(term, scale, total),
              rest = __builtin_fmaf(term, scale, total - sum);
  term = rest < -most ? -most : rest < most ? rest : most;  // NaN becomes `most`, as with min
  total = sum;
}

inline void add_with_rest(float& total, float& term, float scale) { add_keeping_rest(total, term, scale); }

// ---- Shared memory.

inline unsigned shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline uint4 load_shared(unsigned address) {
  if (address % 16u) emulator::fail("a 16-byte load from shared memory at %u", address);
  uint4 value;
  const void* from = emulator::shared_pointer(address, sizeof value);
  emulator::races::read(from, sizeof value);
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline uint2 load_shared_again(unsigned address) {
  if (address % 8u) emulator::fail("an 8-byte load from shared memory at %u", address);
  uint2 value;
  const void* from = emulator::shared_pointer(address, sizeof value);
  emulator::races::read(from, sizeof value);
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline void store_shared(unsigned address, uint4 value) {
  if (address % 16u) emulator::fail("a 16-byte store to shared memory at %u", address);
  void* to = emulator::shared_pointer(address, sizeof value);
  emulator::races::write(to, sizeof value);
  std::memcpy(to, &value, sizeof value);
}

// A launch that may overlap the previous one always begins before it, whether that has called this or not.
inline void launch_dependents() {}
inline void wait_for_previous_launch() { emulator::wait_for_previous_launch(); }

inline unsigned low_halves(unsigned first, unsigned second) { return (first & 0xFFFFu) | second << 16; }
inline unsigned high_halves(unsigned first, unsigned second) { return first >> 16 | (second & 0xFFFF0000u); }

inline unsigned shifted(unsigned word, unsigned after, unsigned bits) {
  return static_cast<unsigned>((static_cast<unsigned long long>(after) << 32 | word) >> bits);
}

template <class Vector>
inline void store_global(void* address, Vector value) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof value) {
    emulator::fail("a store of %zu bytes at %p", sizeof value, address);
  }
  std::memcpy(address, &value, sizeof value);
}

template <class Vector>
inline void store_global_if(bool condition, void* address, Vector value) {
  if (condition) store_global(address, value);
}

template <class Word>
inline void store_shared_if(bool condition, unsigned address, Word value) {
  if (!condition) return;
  if (address % sizeof value) emulator::fail("a store of %zu bytes at %u", sizeof value, address);
  void* to = emulator::shared_pointer(address, sizeof value);
  emulator::races::write(to, sizeof value);
  std::memcpy(to, &value, sizeof value);
}

template <class Vector>
inline void store_passing(void* address, Vector value) {
  store_global(address, value);
}

template <class Vector>
inline void load_passing(const void* address, Vector& value) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof value) {
    emulator::fail("a load of %zu bytes at %p", sizeof value, address);
  }
  std::memcpy(&value, address, sizeof value);
}

template <class Vector>
inline void load_constant_if(bool condition, const void* address, Vector& value) {
  if (condition) load_passing(address, value);
}

inline unsigned take_turn(unsigned* turns) { return ++*turns; }
inline unsigned take_turn_below(unsigned* turns, unsigned end) {
  return *turns + 1 < end ? take_turn(turns) : end;
}
inline unsigned turns_taken(const unsigned* turns) {
  emulator::yield();
  return *turns + 1;
}
inline void write_word(void* address, unsigned long long word) { store_global(address, word); }
inline unsigned long long read_when_written(const void* address) {
  unsigned long long word = ~0ull;
  emulator::wait_until(
      [&] {
        load_passing(address, word);
        return word != ~0ull;
      },
      "read_when_written");
  return word;
}

inline unsigned long long look_at_word(const void* address) {
  unsigned long long word;
  load_passing(address, word);
  return word;
}

inline void write_shared(int* address, int value) {
  emulator::races::ignore(address, sizeof *address);
  *address = value;
}
inline int read_shared(const int* address) {
  emulator::races::ignore(address, sizeof *address);
  return *address;
}

inline void keep(float&) {}
inline void renew(int&) {}
inline void renew(long long&) {}

// A prefetch reads the address, so that sanitizers see it: a prefetch may not leave its tensor either.
inline void call_into_l2(const void* address) { (void)*static_cast<const volatile char*>(address); }
inline void call_into_l2_if(bool condition, const void* address) {
  if (condition) call_into_l2(address);
}
inline uint4 load_calling(const void* address) { return *static_cast<const uint4*>(address); }

// ---- What is executed later.

// The asynchronous instructions that a thread has issued and not waited for, oldest first. They are executed
// as late as possible, when a wait says that they are done, so that data that is read too early or
// overwritten too early gives wrong results.
template <class Item, unsigned kMostGroups>
struct EmulatedQueue {
  Item* items = nullptr;
  unsigned size = 0, capacity = 0;
  unsigned committed[kMostGroups];  // ends of the committed groups in the queue
  unsigned groups = 0;
  EmulatedQueue() = default;
  EmulatedQueue(const EmulatedQueue&) = delete;
  EmulatedQueue& operator=(const EmulatedQueue&) = delete;
  ~EmulatedQueue() { delete[] items; }

  void push(const Item& item) {
    if (size == capacity) {
      capacity = capacity ? 2 * capacity : 64;
      auto* larger = new Item[capacity];
      for (unsigned i = 0; i < size; ++i) larger[i] = items[i];
      delete[] items;
      items = larger;
    }
    items[size++] = item;
  }
  void commit(const char* what) {
    if (groups == kMostGroups) emulator::fail("more than %u groups of %s at once", kMostGroups, what);
    committed[groups++] = size;
  }
  // Executes the committed groups but the last `pending`, and returns whether there were any.
  bool wait(unsigned pending) {
    if (groups <= pending) return false;
    const unsigned finished = groups - pending, end = committed[finished - 1];
    for (unsigned i = 0; i < end; ++i) execute(items[i]);
    for (unsigned i = end; i < size; ++i) items[i - end] = items[i];
    size -= end;
    for (unsigned i = finished; i < groups; ++i) committed[i - finished] = committed[i] - end;
    groups -= finished;
    return true;
  }
};

// ---- Warp matrix instructions.

enum class Operand { kTf32, kFloat16, kBFloat16 };

// The registers that the lanes of each warp of a block pass to each other in a matrix instruction.
struct EmulatedFragments {
  std::uint32_t a[32][32][4];
  std::uint32_t b[32][32][2];
};

// Returns number `item` of a word of operands. Tensor cores read the upper 19 bits of a TF32 number.
inline float operand_of_word(std::uint32_t word, unsigned item, Operand operand) {
  if (operand == Operand::kTf32) return bits_to_float(word & 0xFFFFE000u);
  const auto bits = static_cast<unsigned short>(word >> (16u * item));
  return operand == Operand::kFloat16 ? half_to_float(bits) : bits_to_float(std::uint32_t{bits} << 16);
}

template <unsigned kMatrices>
EMULATOR_TOGETHER void load_matrices(unsigned (&words)[kMatrices], unsigned address) {
  if (address % 16u) emulator::fail("a row of a matrix loaded from shared memory at %u", address);
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u;
  table.a[warp][lane][0] = address;
  emulator::converge("load_matrices", EMULATOR_CALL);
  for (unsigned m = 0; m < kMatrices; ++m) {
    const void* from = emulator::shared_pointer(table.a[warp][8u * m + lane / 4u][0] + 4u * (lane % 4u), 4);
    emulator::races::read(from, 4);
    std::memcpy(&words[m], from, 4);
  }
  emulator::converge("load_matrices");
}

template <Operand kOperand, unsigned kWords>
EMULATOR_TOGETHER void warp_multiply(float (&sum)[4], const unsigned (&a)[2 * kWords],
                                     const unsigned (&b)[kWords]) {
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u;
  for (unsigned i = 0; i < 2 * kWords; ++i) table.a[warp][lane][i] = a[i];
  for (unsigned i = 0; i < kWords; ++i) table.b[warp][lane][i] = b[i];
  emulator::converge("warp_multiply", EMULATOR_CALL);
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned half = i / 2u, column = lane % 4u * 2u + i % 2u;
    float total = 0.0f;
    for (unsigned word = 0; word < 4 * kWords; ++word) {
      const std::uint32_t left = table.a[warp][lane / 4u * 4u + word % 4u][half + word / 4u * 2u];
      const std::uint32_t right = table.b[warp][column * 4u + word % 4u][word / 4u];
      for (unsigned item = 0; item < (kOperand == Operand::kTf32 ? 1u : 2u); ++item)
        total += operand_of_word(left, item, kOperand) * operand_of_word(right, item, kOperand);
    }
    sum[i] += total;
  }
  emulator::converge("warp_multiply");
}

EMULATOR_TOGETHER void store_transposed(unsigned address, uint4 words) {
  if (address % 16u) emulator::fail("a row of a matrix stored to shared memory at %u", address);
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u, row = lane % 8u;
  std::memcpy(table.a[warp][lane], &words, sizeof words);
  emulator::converge("store_transposed", EMULATOR_CALL);
  std::uint16_t columns[8];
  for (unsigned c = 0; c < 8; ++c)
    columns[c] =
        static_cast<std::uint16_t>(table.a[warp][4u * c + row / 2u][lane / 8u] >> (16u * (row % 2u)));
  void* to = emulator::shared_pointer(address, sizeof columns);
  std::memcpy(to, columns, sizeof columns);
  emulator::converge("store_transposed");
}

// ---- Asynchronous copies.

struct EmulatedCopy {
  std::uint32_t* to;
  const void* from;                        // null: the copy writes zero
  unsigned bytes = sizeof(std::uint32_t);  // bytes that are read, behind which the copy writes zeros
};
using EmulatedCopies = EmulatedQueue<EmulatedCopy, 8>;

inline void execute(const EmulatedCopy& copy) {
  std::uint32_t word = 0;
  if (copy.from) std::memcpy(&word, copy.from, copy.bytes);
  emulator::races::write(copy.to, sizeof word);
  *copy.to = word;
}

// Copies the first `bytes` of kWords words, and writes zeros behind them.
template <int kWords>
inline void copy_bytes(void* to, const void* from, unsigned bytes) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  constexpr unsigned kBytes = 4u * kWords;
  if (reinterpret_cast<std::uintptr_t>(to) % kBytes || reinterpret_cast<std::uintptr_t>(from) % kBytes)
    emulator::fail("an asynchronous copy of %u bytes that is not aligned", kBytes);
  if (bytes > kBytes) emulator::fail("an asynchronous copy of %u bytes reads %u", kBytes, bytes);
  emulator::shared_pointer(emulator::shared_address(to), kBytes);  // fails outside of shared memory
  emulator::races::write(to, kBytes);  // a GPU may write at any time from here to the wait
  for (unsigned i = 0; i < kWords; ++i) {
    const unsigned left = bytes > 4 * i ? bytes - 4 * i : 0u;
    emulator::thread_state<EmulatedCopies>().push(
        {static_cast<std::uint32_t*>(to) + i, left > 0 ? static_cast<const char*>(from) + 4 * i : nullptr,
         left < 4 ? left : 4u});
  }
}
template <int kWords>
inline void copy_words(void* to, const void* from, bool inside) {
  copy_bytes<kWords>(to, from, inside ? 4u * kWords : 0u);
}

inline void copy_beginning(void* to, const void* from, unsigned bytes) { copy_bytes<4>(to, from, bytes); }

template <int kWords>
inline void copy_words_once(void* to, const void* from, bool inside) {
  copy_words<kWords>(to, from, inside);
}

template <int kWords>
inline void copy_words_of_line(void* to, const void* from, bool inside) {
  copy_words<kWords>(to, from, inside);
}

inline void copy_piece(unsigned to, const void* from, unsigned inside) {
  copy_words<4>(emulator::shared_pointer(to, 16), from, inside);
}

inline void copy_word(unsigned to, const void* from, unsigned inside) {
  copy_words<1>(emulator::shared_pointer(to, 4), from, inside);
}

inline void copy_beginning_once(unsigned to, const void* from, int bytes) {
  copy_bytes<4>(emulator::shared_pointer(to, 16), from, static_cast<unsigned>(bytes));
}

inline void copy_commit() { emulator::thread_state<EmulatedCopies>().commit("asynchronous copies"); }

template <int kPending>
inline void copy_wait() {
  emulator::thread_state<EmulatedCopies>().wait(kPending);
}

// ---- Barriers in shared memory.

struct EmulatedBarrier {
  std::uint16_t count;    // arrivals per phase
  std::uint16_t missing;  // arrivals that the current phase still lacks: at most 2^15
  std::int32_t bytes : 31;
  std::uint32_t parity : 1;  // parity of the current phase
};
static_assert(sizeof(EmulatedBarrier) == 8, "an mbarrier has 8 bytes");

inline EmulatedBarrier& emulated_barrier(unsigned address) {
  if (address % 8u) emulator::fail("a barrier in shared memory at %u", address);
  return *static_cast<EmulatedBarrier*>(emulator::shared_pointer(address, 8));
}

inline void complete_phase_if_done(EmulatedBarrier& barrier, unsigned address) {
  if (barrier.missing || barrier.bytes) return;
  emulator::races::complete_phase(address, barrier.parity);
  barrier.missing = barrier.count;
  barrier.parity ^= 1u;
}

inline void barrier_init(unsigned address, unsigned count) {
  EmulatedBarrier& barrier = emulated_barrier(address);
  emulator::races::init_barrier(address);
  barrier.count = barrier.missing = static_cast<std::uint16_t>(count);
  barrier.bytes = 0;
  barrier.parity = 0;
}

inline void arrive_at(unsigned address, unsigned bytes) {
  EmulatedBarrier& barrier = emulated_barrier(address);
  if (barrier.missing == 0) emulator::fail("more arrivals at the barrier at %u than it counts", address);
  emulator::races::arrive(address);
  barrier.missing -= 1;
  barrier.bytes += static_cast<std::int32_t>(bytes);
  complete_phase_if_done(barrier, address);
}

inline void barrier_arrive(unsigned address) { arrive_at(address, 0); }

inline void copy_arrive(unsigned address) {
  auto& copies = emulator::thread_state<EmulatedCopies>();
  for (unsigned i = 0; i < copies.size; ++i) execute(copies.items[i]);
  copies.size = copies.groups = 0;
  barrier_arrive(address);
}

inline void barrier_poll(unsigned address, unsigned parity) {
  EmulatedBarrier& barrier = emulated_barrier(address);
  emulator::wait_until([&] { return barrier.parity != parity; }, "barrier_poll");
  emulator::races::pass(address, parity);
}

}  // namespace tconv3d::ptx
