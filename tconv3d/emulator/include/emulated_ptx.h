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

inline void add_keeping_rest(float& total, float& term, float scale) {
  const float most = 0x1p104f, sum = __builtin_fmaf(term, scale, total),
              rest = __builtin_fmaf(term, scale, total - sum);
  term = rest < -most ? -most : rest < most ? rest : most;  // NaN becomes `most`, as with min
  total = sum;
}

// ---- Shared memory.

inline unsigned shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline uint4 load_shared(unsigned address) {
  if (address % 16u) emulator::fail("a 16-byte load from shared memory at %u", address);
  uint4 value;
  std::memcpy(&value, emulator::shared_pointer(address, sizeof value), sizeof value);
  return value;
}
inline void store_shared(unsigned address, uint4 value) {
  if (address % 16u) emulator::fail("a 16-byte store to shared memory at %u", address);
  std::memcpy(emulator::shared_pointer(address, sizeof value), &value, sizeof value);
}

// Launches never overlap in the emulator.
inline void launch_dependents() {}
inline void wait_for_previous_launch() {}

// The registers that the lanes of each warp of a block pass to each other in a matrix instruction.
struct EmulatedFragments {
  std::uint32_t a[32][32][4];
  std::uint32_t b[32][32][2];
};

inline unsigned low_halves(unsigned first, unsigned second) { return (first & 0xFFFFu) | second << 16; }
inline unsigned high_halves(unsigned first, unsigned second) { return first >> 16 | (second & 0xFFFF0000u); }

inline unsigned shifted(unsigned word, unsigned after, unsigned bits) {
  return static_cast<unsigned>((static_cast<unsigned long long>(after) << 32 | word) >> bits);
}
inline void store_transposed(unsigned address, uint4 words) {
  if (address % 16u) emulator::fail("a row of a matrix stored to shared memory at %u", address);
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u, row = lane % 8u;
  std::memcpy(table.a[warp][lane], &words, sizeof words);
  __syncwarp();
  std::uint16_t columns[8];
  for (unsigned c = 0; c < 8; ++c)
    columns[c] =
        static_cast<std::uint16_t>(table.a[warp][4u * c + row / 2u][lane / 8u] >> (16u * (row % 2u)));
  std::memcpy(emulator::shared_pointer(address, sizeof columns), columns, sizeof columns);
  __syncwarp();
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
  std::memcpy(emulator::shared_pointer(address, sizeof value), &value, sizeof value);
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

inline void write_shared(int* address, int value) { *address = value; }
inline int read_shared(const int* address) { return *address; }

inline void fence_async_proxy() {}
inline void fence_barrier_init() {}

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

inline void complete_phase_if_done(EmulatedBarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.count;
  barrier.parity ^= 1u;
}

inline void barrier_init(unsigned address, unsigned count) {
  EmulatedBarrier& barrier = emulated_barrier(address);
  barrier.count = barrier.missing = static_cast<std::uint16_t>(count);
  barrier.bytes = 0;
  barrier.parity = 0;
}

inline void barrier_arrive_expect(unsigned address, unsigned bytes) {
  EmulatedBarrier& barrier = emulated_barrier(address);
  if (barrier.missing == 0) emulator::fail("more arrivals at the barrier at %u than it counts", address);
  barrier.missing -= 1;
  barrier.bytes += static_cast<std::int32_t>(bytes);
  complete_phase_if_done(barrier);
}

inline void barrier_arrive(unsigned address) { barrier_arrive_expect(address, 0); }

inline void barrier_wait(unsigned address, unsigned parity) {
  const EmulatedBarrier& barrier = emulated_barrier(address);
  emulator::wait_until([&] { return barrier.parity != parity; }, "barrier_wait");
}

inline bool barrier_complete(unsigned address, unsigned parity) {
  return emulated_barrier(address).parity != parity;
}

inline bool barrier_wait_either(unsigned first, unsigned first_parity, unsigned second,
                                unsigned second_parity) {
  const EmulatedBarrier &one = emulated_barrier(first), &other = emulated_barrier(second);
  emulator::wait_until([&] { return one.parity != first_parity || other.parity != second_parity; },
                       "barrier_wait_either");
  return one.parity != first_parity;
}

inline bool elected(int lane) { return lane == 0; }

inline void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned address) {
  if (to % 16u || bytes % 16u || reinterpret_cast<std::uintptr_t>(from) % 16u)
    emulator::fail("a bulk copy of %u bytes to %u: all must be multiples of 16", bytes, to);
  std::memcpy(emulator::shared_pointer(to, bytes), from, bytes);
  EmulatedBarrier& barrier = emulated_barrier(address);
  barrier.bytes -= static_cast<std::int32_t>(bytes);
  complete_phase_if_done(barrier);
}

// Bulk stores are executed as late as possible, when a wait says that shared memory has been read.
struct EmulatedBulkStores {
  struct Store {
    void* to;
    unsigned from, bytes;
  };
  Store queue[32];
  unsigned count = 0, committed = 0;
};
inline void bulk_store(void* to, unsigned from, unsigned bytes) {
  if (from % 16u || bytes % 16u || reinterpret_cast<std::uintptr_t>(to) % 16u)
    emulator::fail("a bulk copy of %u bytes from %u: all must be multiples of 16", bytes, from);
  auto& stores = emulator::thread_state<EmulatedBulkStores>();
  if (stores.count == 32) emulator::fail("more than 32 bulk copies of a thread from shared memory at once");
  stores.queue[stores.count++] = {to, from, bytes};
}
inline void bulk_commit() {
  auto& stores = emulator::thread_state<EmulatedBulkStores>();
  stores.committed = stores.count;
}
inline void bulk_wait_read() {
  auto& stores = emulator::thread_state<EmulatedBulkStores>();
  for (unsigned i = 0; i < stores.committed; ++i) {
    const auto& store = stores.queue[i];
    std::memcpy(store.to, emulator::shared_pointer(store.from, store.bytes), store.bytes);
  }
  for (unsigned i = stores.committed; i < stores.count; ++i) {
    stores.queue[i - stores.committed] = stores.queue[i];
  }
  stores.count -= stores.committed;
  stores.committed = 0;
}

struct EmulatedMeetings {
  unsigned count[16] = {}, phase[16] = {};
};
inline void warpgroup_sync(int which) {
  auto& meetings = emulator::block_state<EmulatedMeetings>();
  const unsigned phase = meetings.phase[which];
  if (++meetings.count[which] == 128) {
    meetings.count[which] = 0;
    ++meetings.phase[which];
  }
  emulator::wait_until([&] { return meetings.phase[which] != phase; }, "warpgroup_sync");
}

template <int kRegisters>
inline void keep_registers() {}
template <int kRegisters>
inline void claim_registers() {}

// ---- Warpgroup matrix instructions. They are executed as late as possible, when a wait says that they are
// done, so that an operand that is overwritten too early or a sum that is read too early gives wrong results.

enum class Operand { kTf32, kFloat16, kBFloat16 };

template <int kRowBytes>
inline unsigned long long matrix_descriptor(unsigned address, unsigned group_bytes) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "swizzles exist for these rows");
  constexpr unsigned long long kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  if (address % 16u || group_bytes % 16u || (group_bytes >> 4) > 0x3FFFu)
    emulator::fail("a matrix descriptor cannot say address %u, group of rows %u", address, group_bytes);
  return static_cast<unsigned long long>((address & 0x3FFFFu) >> 4) | 1ull << 16 |
         static_cast<unsigned long long>(group_bytes >> 4) << 32 | kSwizzle << 62;
}

inline unsigned long long advance(unsigned long long descriptor, unsigned bytes) {
  return descriptor + (bytes >> 4);
}

struct EmulatedMultiply {
  float* sums;
  const unsigned* fragment;  // A in registers; null: A is in shared memory at descriptor `a`
  unsigned long long a, b;
  int columns;
  Operand operand;
  bool rows = false;  // rows of the operands in shared memory are K
};

// The matrix instructions that a thread has issued and not waited for, oldest first.
struct EmulatedMultiplies {
  EmulatedMultiply* queue = nullptr;
  unsigned size = 0, capacity = 0;
  unsigned committed[16];  // ends of the committed groups in the queue
  unsigned groups = 0;
  EmulatedMultiplies() = default;
  EmulatedMultiplies(const EmulatedMultiplies&) = delete;
  EmulatedMultiplies& operator=(const EmulatedMultiplies&) = delete;
  ~EmulatedMultiplies() { delete[] queue; }

  void push(const EmulatedMultiply& item) {
    if (size == capacity) {
      capacity = capacity ? 2 * capacity : 64;
      auto* larger = new EmulatedMultiply[capacity];
      for (unsigned i = 0; i < size; ++i) larger[i] = queue[i];
      delete[] queue;
      queue = larger;
    }
    queue[size++] = item;
  }
};

// Reads 32 bytes of a row of an operand as numbers, and returns how many they are. Tensor cores read the
// upper 19 bits of a TF32 number.
inline int read_operand_row(unsigned long long descriptor, unsigned row, Operand operand,
                            float (&values)[16]) {
  const auto layout = static_cast<unsigned>(descriptor >> 62);
  const unsigned row_bytes = layout == 1 ? 128 : layout == 2 ? 64 : 32;
  const unsigned group_bytes = static_cast<unsigned>(descriptor >> 32 & 0x3FFFu) << 4;
  const unsigned start = emulator::map_shared_rank(static_cast<unsigned>(descriptor & 0x3FFFu) << 4,
                                                   emulator::block().rank_in_cluster);
  const int count = operand == Operand::kTf32 ? 8 : 16;
  for (unsigned half = 0; half < 2; ++half) {
    const unsigned logical = start + row / 8u * group_bytes + row % 8u * row_bytes + 16u * half;
    const unsigned physical = logical ^ ((logical >> 7 & (row_bytes / 16u - 1u)) << 4);
    const void* bytes = emulator::shared_pointer(physical, 16);
    if (operand == Operand::kTf32) {
      std::uint32_t bits[4];
      std::memcpy(bits, bytes, sizeof bits);
      for (unsigned i = 0; i < 4; ++i) values[4 * half + i] = bits_to_float(bits[i] & 0xFFFFE000u);
    } else {
      std::uint16_t bits[8];
      std::memcpy(bits, bytes, sizeof bits);
      for (unsigned i = 0; i < 8; ++i)
        values[8 * half + i] = operand == Operand::kFloat16 ? half_to_float(bits[i])
                                                            : bits_to_float(std::uint32_t{bits[i]} << 16);
    }
  }
  return count;
}

// Returns number `item` of a word of operands. Tensor cores read the upper 19 bits of a TF32 number.
inline float operand_of_word(std::uint32_t word, unsigned item, Operand operand) {
  if (operand == Operand::kTf32) return bits_to_float(word & 0xFFFFE000u);
  const auto bits = static_cast<unsigned short>(word >> (16u * item));
  return operand == Operand::kFloat16 ? half_to_float(bits) : bits_to_float(std::uint32_t{bits} << 16);
}

// Reads rows lane/4 and lane/4 + 8 of a warp's 16 rows from the registers of the lanes that hold them.
inline void read_fragment_rows(const unsigned* fragment, Operand operand, float (&rows)[2][16]) {
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u;
  const unsigned per_word = operand == Operand::kTf32 ? 1 : 2;
  std::memcpy(table.a[warp][lane], fragment, sizeof table.a[warp][lane]);
  __syncwarp();
  for (unsigned half = 0; half < 2; ++half)
    for (unsigned word = 0; word < 8; ++word)
      for (unsigned item = 0; item < per_word; ++item)
        rows[half][word * per_word + item] =
            operand_of_word(table.a[warp][lane / 4u * 4u + word % 4u][half + word / 4u * 2u], item, operand);
  __syncwarp();
}

// Reads column `column` of an operand whose 16 rows of 128 bytes in shared memory are K.
inline int read_operand_column(unsigned long long descriptor, unsigned column, Operand operand,
                               float (&values)[16]) {
  if (descriptor >> 62 != 1 || column >= 64)
    emulator::fail("rows that are K have 128 bytes: column %u of layout %u", column,
                   static_cast<unsigned>(descriptor >> 62));
  const unsigned group_bytes = static_cast<unsigned>(descriptor >> 32 & 0x3FFFu) << 4;
  const unsigned start = emulator::map_shared_rank(static_cast<unsigned>(descriptor & 0x3FFFu) << 4,
                                                   emulator::block().rank_in_cluster);
  for (unsigned k = 0; k < 16; ++k) {
    const unsigned logical = start + k / 8u * group_bytes + k % 8u * 128u + 2u * column;
    const unsigned physical = logical ^ ((logical >> 7 & 7u) << 4);
    std::uint16_t bits;
    std::memcpy(&bits, emulator::shared_pointer(physical, 2), sizeof bits);
    values[k] = operand == Operand::kFloat16 ? half_to_float(bits) : bits_to_float(std::uint32_t{bits} << 16);
  }
  return 16;
}

inline void execute(const EmulatedMultiply& item) {
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u % 4u;
  const auto read = item.rows ? read_operand_column : read_operand_row;
  float rows[2][16], column[16];
  if (item.fragment) {
    read_fragment_rows(item.fragment, item.operand, rows);
  } else {
    for (unsigned half = 0; half < 2; ++half)
      read(item.a, 16u * warp + lane / 4u + 8u * half, item.operand, rows[half]);
  }
  for (int j = 0; j < item.columns / 8; ++j)
    for (unsigned e = 0; e < 2; ++e) {
      const int count =
          read(item.b, 8u * static_cast<unsigned>(j) + 2u * (lane % 4u) + e, item.operand, column);
      for (int half = 0; half < 2; ++half) {
        float sum = 0.0f;
        for (int k = 0; k < count; ++k) sum += rows[half][k] * column[k];
        item.sums[4 * j + 2 * half + static_cast<int>(e)] += sum;
      }
    }
}

inline void pin(float&) {}
inline void pin(unsigned&) {}
template <class T>
inline void pin(T*&) {}
inline void matrix_fence() {}

inline void matrix_commit() {
  auto& issued = emulator::thread_state<EmulatedMultiplies>();
  if (issued.groups == 16) emulator::fail("more than 16 groups of matrix instructions at once");
  issued.committed[issued.groups++] = issued.size;
  __syncwarp();  // matrix instructions wait until all lanes of the warp execute them
}

template <int kPending>
inline void matrix_wait() {
  __syncwarp();  // .sync.aligned: all lanes of the warp wait together, even if nothing is unfinished
  auto& issued = emulator::thread_state<EmulatedMultiplies>();
  if (issued.groups <= kPending) return;
  const unsigned finished = issued.groups - kPending, end = issued.committed[finished - 1];
  for (unsigned i = 0; i < end; ++i) execute(issued.queue[i]);
  for (unsigned i = end; i < issued.size; ++i) issued.queue[i - end] = issued.queue[i];
  issued.size -= end;
  for (unsigned i = finished; i < issued.groups; ++i)
    issued.committed[i - finished] = issued.committed[i] - end;
  issued.groups -= finished;
  __syncwarp();  // the operands of all lanes have been read
}

template <int kColumns>
struct MatrixMultiply {
  static_assert(kColumns % 8 == 0 && 8 <= kColumns && kColumns <= 256, "columns that wgmma has");
  template <Operand kOperand>
  static void issue(float* sums, unsigned long long a, unsigned long long b) {
    emulator::thread_state<EmulatedMultiplies>().push({sums, nullptr, a, b, kColumns, kOperand});
  }
  template <Operand kOperand>
  static void issue(float* sums, const unsigned (&a)[4], unsigned long long b) {
    emulator::thread_state<EmulatedMultiplies>().push({sums, a, 0, b, kColumns, kOperand});
  }
  template <Operand kOperand>
  static void issue_rows(float* sums, unsigned long long a, unsigned long long b) {
    static_assert(kOperand != Operand::kTf32, "rows of 32-bit numbers cannot be K");
    emulator::thread_state<EmulatedMultiplies>().push({sums, nullptr, a, b, kColumns, kOperand, true});
  }
};

// ---- Warp matrix instructions.

inline void load_matrices(unsigned (&words)[4], unsigned address) {
  if (address % 16u) emulator::fail("a row of a matrix loaded from shared memory at %u", address);
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u;
  table.a[warp][lane][0] = address;
  __syncwarp();
  for (unsigned m = 0; m < 4; ++m)
    std::memcpy(&words[m],
                emulator::shared_pointer(table.a[warp][8u * m + lane / 4u][0] + 4u * (lane % 4u), 4), 4);
  __syncwarp();
}

template <Operand kOperand>
inline void warp_multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u;
  for (unsigned i = 0; i < 4; ++i) table.a[warp][lane][i] = a[i];
  for (unsigned i = 0; i < 2; ++i) table.b[warp][lane][i] = b[i];
  __syncwarp();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned half = i / 2u, column = lane % 4u * 2u + i % 2u;
    float total = 0.0f;
    for (unsigned word = 0; word < 8; ++word) {
      const std::uint32_t left = table.a[warp][lane / 4u * 4u + word % 4u][half + word / 4u * 2u];
      const std::uint32_t right = table.b[warp][column * 4u + word % 4u][word / 4u];
      for (unsigned item = 0; item < (kOperand == Operand::kTf32 ? 1u : 2u); ++item)
        total += operand_of_word(left, item, kOperand) * operand_of_word(right, item, kOperand);
    }
    sum[i] += total;
  }
  __syncwarp();
}

// ---- Asynchronous copies. They are executed as late as possible, when a wait says that they are done,
// so that data that is read too early or overwritten too early gives wrong results.

struct EmulatedCopies {
  struct Copy {
    std::uint32_t* to;
    const void* from;  // null: the copy writes zero
  };
  Copy* queue = nullptr;
  unsigned size = 0, capacity = 0;
  unsigned committed[8];  // ends of the committed groups in the queue
  unsigned groups = 0;
  EmulatedCopies() = default;
  EmulatedCopies(const EmulatedCopies&) = delete;
  EmulatedCopies& operator=(const EmulatedCopies&) = delete;
  ~EmulatedCopies() { delete[] queue; }
};

inline void queue_copy(std::uint32_t* to, const void* from) {
  auto& copies = emulator::thread_state<EmulatedCopies>();
  if (copies.size == copies.capacity) {
    copies.capacity = copies.capacity ? 2 * copies.capacity : 64;
    auto* larger = new EmulatedCopies::Copy[copies.capacity];
    for (unsigned i = 0; i < copies.size; ++i) larger[i] = copies.queue[i];
    delete[] copies.queue;
    copies.queue = larger;
  }
  copies.queue[copies.size++] = {to, from};
}

inline void keep(float&) {}

// A prefetch reads the address, so that sanitizers see it: a prefetch may not leave its tensor either.
inline void call_into_l2(const void* address) { (void)*static_cast<const volatile char*>(address); }
inline uint4 load_calling(const void* address) { return *static_cast<const uint4*>(address); }

template <int kWords>
inline void copy_words(void* to, const void* from, bool inside) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  constexpr unsigned kBytes = 4u * kWords;
  if (reinterpret_cast<std::uintptr_t>(to) % kBytes || reinterpret_cast<std::uintptr_t>(from) % kBytes)
    emulator::fail("an asynchronous copy of %u bytes that is not aligned", kBytes);
  emulator::shared_pointer(emulator::shared_address(to), kBytes);  // fails outside of shared memory
  for (int i = 0; i < kWords; ++i)
    queue_copy(static_cast<std::uint32_t*>(to) + i,
               inside ? static_cast<const char*>(from) + 4 * i : nullptr);
}
template <int kWords>
inline void copy_words_once(void* to, const void* from, bool inside) {
  copy_words<kWords>(to, from, inside);
}

template <int kWords>
inline void copy_words_of_line(void* to, const void* from, bool inside) {
  copy_words<kWords>(to, from, inside);
}

inline void copy_piece(unsigned to, const void* from, bool inside) {
  copy_words<4>(emulator::shared_pointer(to, 16), from, inside);
}

inline void copy_word(unsigned to, const void* from, bool inside) {
  copy_words<1>(emulator::shared_pointer(to, 4), from, inside);
}

inline void copy_commit() {
  auto& copies = emulator::thread_state<EmulatedCopies>();
  if (copies.groups == 8) emulator::fail("more than 8 groups of asynchronous copies at once");
  copies.committed[copies.groups++] = copies.size;
}

inline void execute_copies(EmulatedCopies& copies, unsigned end) {
  for (unsigned i = 0; i < end; ++i) {
    std::uint32_t word = 0;
    if (copies.queue[i].from) std::memcpy(&word, copies.queue[i].from, sizeof word);
    *copies.queue[i].to = word;
  }
}

template <int kPending>
inline void copy_wait() {
  auto& copies = emulator::thread_state<EmulatedCopies>();
  if (copies.groups <= kPending) return;
  const unsigned finished = copies.groups - kPending, end = copies.committed[finished - 1];
  execute_copies(copies, end);
  for (unsigned i = end; i < copies.size; ++i) copies.queue[i - end] = copies.queue[i];
  copies.size -= end;
  for (unsigned i = finished; i < copies.groups; ++i)
    copies.committed[i - finished] = copies.committed[i] - end;
  copies.groups -= finished;
}

inline void copy_arrive(unsigned address) {
  auto& copies = emulator::thread_state<EmulatedCopies>();
  execute_copies(copies, copies.size);
  copies.size = copies.groups = 0;
  barrier_arrive(address);
}

}  // namespace tconv3d::ptx
