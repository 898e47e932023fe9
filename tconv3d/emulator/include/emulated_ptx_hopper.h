// The functions of device/ptx_hopper.cuh in plain C++ for the emulator, with the same names and results.
#pragma once

#include "emulated_ptx.h"

namespace tconv3d::ptx {

inline void fence_async_proxy() { emulator::races::fence_async_proxy(); }
inline void fence_barrier_init() {}

// ---- Barriers in shared memory.

inline void barrier_arrive_expect(unsigned address, unsigned bytes) { arrive_at(address, bytes); }

// The bulk copies of a block that are in flight. A copy is executed as late as possible, when a thread waits
// for its barrier; until then its destination is poisoned, so that data that is read too early or overwritten
// too early gives wrong results.
struct EmulatedBulkCopy {
  unsigned to, bytes, barrier;
  const void* from;
};
struct EmulatedBulkCopies {
  EmulatedBulkCopy* items = nullptr;
  unsigned size = 0, capacity = 0;
  EmulatedBulkCopies() = default;
  EmulatedBulkCopies(const EmulatedBulkCopies&) = delete;
  EmulatedBulkCopies& operator=(const EmulatedBulkCopies&) = delete;
  ~EmulatedBulkCopies() {
    if (size)
      emulator::complain("a block ends while %u bulk copies to its shared memory are in flight", size);
    delete[] items;
  }

  void push(const EmulatedBulkCopy& item) {
    if (size == capacity) {
      capacity = capacity ? 2 * capacity : 64;
      auto* larger = new EmulatedBulkCopy[capacity];
      for (unsigned i = 0; i < size; ++i) larger[i] = items[i];
      delete[] items;
      items = larger;
    }
    items[size++] = item;
  }
};

inline void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned address) {
  if (to % 16u || bytes % 16u || reinterpret_cast<std::uintptr_t>(from) % 16u)
    emulator::fail("a bulk copy of %u bytes to %u: all must be multiples of 16", bytes, to);
  void* destination = emulator::shared_pointer(to, bytes);
  emulated_barrier(address);
  emulator::races::write_by_copy_engine(destination, bytes, address);
  std::memset(destination, static_cast<int>(emulator::kPoison), bytes);
  emulator::block_state<EmulatedBulkCopies>().push({to, bytes, address, from});
}

// Returns whether a phase is complete. Executes the bulk copies that it waits for.
inline bool phase_complete(EmulatedBarrier& barrier, unsigned address, unsigned parity) {
  if (barrier.parity != parity) return true;
  auto& copies = emulator::block_state<EmulatedBulkCopies>();
  unsigned kept = 0;
  for (unsigned i = 0; i < copies.size; ++i) {
    const EmulatedBulkCopy copy = copies.items[i];
    if (copy.barrier != address) {
      copies.items[kept++] = copy;
      continue;
    }
    std::memcpy(emulator::shared_pointer(copy.to, copy.bytes), copy.from, copy.bytes);
    barrier.bytes -= static_cast<std::int32_t>(copy.bytes);
  }
  if (kept == copies.size) return false;
  copies.size = kept;
  complete_phase_if_done(barrier, address);
  return barrier.parity != parity;
}

inline void barrier_wait(unsigned address, unsigned parity) {
  EmulatedBarrier& barrier = emulated_barrier(address);
  emulator::wait_until([&] { return phase_complete(barrier, address, parity); }, "barrier_wait");
  emulator::races::pass(address, parity);
}

inline bool barrier_complete(unsigned address, unsigned parity) {
  const bool complete = phase_complete(emulated_barrier(address), address, parity);
  if (complete) emulator::races::pass(address, parity);
  return complete;
}

inline bool barrier_wait_either(unsigned first, unsigned first_parity, unsigned second,
                                unsigned second_parity) {
  EmulatedBarrier &one = emulated_barrier(first), &other = emulated_barrier(second);
  emulator::wait_until(
      [&] {
        return phase_complete(one, first, first_parity) || phase_complete(other, second, second_parity);
      },
      "barrier_wait_either");
  const bool is_first = one.parity != first_parity;
  emulator::races::pass(is_first ? first : second, is_first ? first_parity : second_parity);
  return is_first;
}

inline bool elected(int lane) { return lane == 0; }

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
  emulator::races::read_by_async_proxy(emulator::shared_pointer(from, bytes), bytes, false);
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
    const void* from = emulator::shared_pointer(store.from, store.bytes);
    emulator::races::read_by_async_proxy(from, store.bytes, false);
    std::memcpy(store.to, from, store.bytes);
  }
  for (unsigned i = stores.committed; i < stores.count; ++i) {
    stores.queue[i - stores.committed] = stores.queue[i];
  }
  stores.count -= stores.committed;
  stores.committed = 0;
}

struct EmulatedMeetings {
  unsigned count[16] = {}, phase[16] = {}, warpgroup[16] = {};
};
inline void warpgroup_sync(int which) {
  auto& meetings = emulator::block_state<EmulatedMeetings>();
  if (which < 1 || which > 15) emulator::fail("hardware barrier %d: a warpgroup may have 1 to 15", which);
  const unsigned phase = meetings.phase[which], warpgroup = emulator::thread_rank() / 128u;
  if (meetings.count[which] == 0) meetings.warpgroup[which] = warpgroup;
  if (meetings.warpgroup[which] != warpgroup)
    emulator::fail("warpgroups %u and %u meet at hardware barrier %d", meetings.warpgroup[which], warpgroup,
                   which);
  if (++meetings.count[which] == 128) {
    emulator::races::meet(128u * warpgroup, 128);
    meetings.count[which] = 0;
    ++meetings.phase[which];
  }
  emulator::wait_until([&] { return meetings.phase[which] != phase; }, "warpgroup_sync");
}

// Registers per thread of each warp. A block starts with as many as its threads can have, and gets no more.
struct EmulatedRegisters {
  unsigned of[32], free = 0;
  EmulatedRegisters() {
    const unsigned start = 65536u / blockDim.x / 8u * 8u;
    for (unsigned& warp : of) warp = start < 256u ? start : 256u;
  }
  ~EmulatedRegisters() {
    for (unsigned warp = 0; warp < blockDim.x / 32u; ++warp)
      if (of[warp] != of[warp / 4u * 4u]) emulator::complain("warps of a warpgroup have different registers");
  }
};
inline void set_registers(unsigned wanted, bool more, const char* what) {
  emulator::converge(what);
  auto& registers = emulator::block_state<EmulatedRegisters>();
  unsigned& own = registers.of[emulator::thread_rank() / 32u];
  if (emulator::lane() == 0) {
    if (more ? wanted < own : wanted > own)
      emulator::fail("%s: %u registers per thread, where a thread has %u", what, wanted, own);
    emulator::wait_until([&] { return own + registers.free >= wanted; }, what);
    registers.free += own - wanted;
    own = wanted;
  }
  emulator::converge(what);
}
template <int kRegisters>
inline void keep_registers() {
  set_registers(kRegisters, false, "keep_registers");
}
template <int kRegisters>
inline void claim_registers() {
  set_registers(kRegisters, true, "claim_registers");
}

// ---- Warpgroup matrix instructions.

template <int kRowBytes>
inline unsigned long long matrix_descriptor(unsigned address, unsigned group_bytes) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "swizzles exist for these rows");
  constexpr unsigned long long kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  if (address % 16u || group_bytes % 16u || (group_bytes >> 4) > 0x3FFFu)
    emulator::fail("a matrix descriptor cannot say address %u, group of rows %u", address, group_bytes);
  return static_cast<unsigned long long>((address & 0x3FFFFu) >> 4) | 1ull << 16 |
         static_cast<unsigned long long>(group_bytes >> 4) << 32 | kSwizzle << 62;
}

inline unsigned long long matrix_descriptor_of_rows(unsigned address, unsigned group_bytes,
                                                    unsigned columns_bytes) {
  if (columns_bytes % 16u || (columns_bytes >> 4) > 0x3FFFu)
    emulator::fail("a matrix descriptor cannot say that columns are %u bytes apart", columns_bytes);
  const unsigned long long one = matrix_descriptor<128>(address, group_bytes) & ~(0x3FFFull << 16);
  return one | static_cast<unsigned long long>(columns_bytes >> 4) << 16;
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

using EmulatedMultiplies = EmulatedQueue<EmulatedMultiply, 16>;

// Tensor cores read operands, and lanes do not: report_operands tells the race detector of these reads.
#define EMULATOR_UNREPORTED __attribute__((no_sanitize("thread")))

// Reads 32 bytes of a row of an operand as numbers, and returns how many they are. Tensor cores read the
// upper 19 bits of a TF32 number.
EMULATOR_UNREPORTED inline int read_operand_row(unsigned long long descriptor, unsigned row, Operand operand,
                                                float (&values)[16]) {
  const auto layout = static_cast<unsigned>(descriptor >> 62);
  const unsigned row_bytes = layout == 1 ? 128 : layout == 2 ? 64 : 32;
  const unsigned group_bytes = static_cast<unsigned>(descriptor >> 32 & 0x3FFFu) << 4;
  const unsigned start = static_cast<unsigned>(descriptor & 0x3FFFu) << 4;
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

// Reads rows lane/4 and lane/4 + 8 of a warp's 16 rows from the registers of the lanes that hold them.
inline void read_fragment_rows(const unsigned* fragment, Operand operand, float (&rows)[2][16]) {
  auto& table = emulator::block_state<EmulatedFragments>();
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u;
  const unsigned per_word = operand == Operand::kTf32 ? 1 : 2;
  std::memcpy(table.a[warp][lane], fragment, sizeof table.a[warp][lane]);
  emulator::converge("matrix_wait");
  for (unsigned half = 0; half < 2; ++half)
    for (unsigned word = 0; word < 8; ++word)
      for (unsigned item = 0; item < per_word; ++item)
        rows[half][word * per_word + item] =
            operand_of_word(table.a[warp][lane / 4u * 4u + word % 4u][half + word / 4u * 2u], item, operand);
  emulator::converge("matrix_wait");
}

// Returns the address in bytes of a number in row k of an operand whose 16 rows of 128 bytes in shared memory
// are K, before it is swizzled. 64 columns follow each other along a row; the leading dimension byte offset
// (bits 16 to 29) leads to the next 64, the stride dimension byte offset (bits 32 to 45) to the next 8 rows.
// This is the 128-byte swizzle of MN-major operands in the PTX ISA's tables of wgmma matrix descriptors,
// which CUTLASS writes as Swizzle<3,4,3> o ((8,8,m),(8,k)):((1,8,LBO),(64,SBO)) for 16-bit numbers.
inline unsigned place_in_row(unsigned long long descriptor, unsigned k, unsigned column) {
  const unsigned group_bytes = static_cast<unsigned>(descriptor >> 32 & 0x3FFFu) << 4;
  const unsigned columns_bytes = static_cast<unsigned>(descriptor >> 16 & 0x3FFFu) << 4;
  const unsigned start = static_cast<unsigned>(descriptor & 0x3FFFu) << 4;
  if (descriptor >> 62 != 1 || (column >= 64 && columns_bytes % 1024u))
    emulator::fail("rows that are K have 128 bytes: column %u of layout %u", column,
                   static_cast<unsigned>(descriptor >> 62));
  return start + k / 8u * group_bytes + k % 8u * 128u + column / 64u * columns_bytes + column % 64u * 2u;
}

// Reads column `column` of such an operand.
EMULATOR_UNREPORTED inline int read_operand_column(unsigned long long descriptor, unsigned column,
                                                   Operand operand, float (&values)[16]) {
  for (unsigned k = 0; k < 16; ++k) {
    const unsigned logical = place_in_row(descriptor, k, column);
    const unsigned physical = logical ^ ((logical >> 7 & 7u) << 4);
    std::uint16_t bits;
    std::memcpy(&bits, emulator::shared_pointer(physical, 2), sizeof bits);
    values[k] = operand == Operand::kFloat16 ? half_to_float(bits) : bits_to_float(std::uint32_t{bits} << 16);
  }
  return 16;
}

// Tells the race detector which operands in shared memory the running lane's warp reads. Each lane reports a
// share of them.
inline void report_operands(const EmulatedMultiply& item) {
#ifdef EMULATOR_RACES
  const unsigned lane = emulator::lane(), warp = emulator::thread_rank() / 32u % 4u;
  const auto report = [&](unsigned long long descriptor, unsigned row, unsigned piece) {
    const auto layout = static_cast<unsigned>(descriptor >> 62);
    const unsigned row_bytes = layout == 1 ? 128 : layout == 2 ? 64 : 32;
    const unsigned group_bytes = static_cast<unsigned>(descriptor >> 32 & 0x3FFFu) << 4;
    const unsigned start = static_cast<unsigned>(descriptor & 0x3FFFu) << 4;
    const unsigned logical = start + row / 8u * group_bytes + row % 8u * row_bytes + 16u * piece;
    const unsigned physical = logical ^ ((logical >> 7 & (row_bytes / 16u - 1u)) << 4);
    emulator::races::read_by_async_proxy(emulator::shared_pointer(physical, 16), 16, true);
  };
  const auto report_rows = [&](unsigned long long descriptor, unsigned k, unsigned piece) {
    const unsigned logical = place_in_row(descriptor, k, 8u * piece);
    const unsigned physical = logical ^ ((logical >> 7 & 7u) << 4);
    emulator::races::read_by_async_proxy(emulator::shared_pointer(physical, 16), 16, true);
  };
  const auto columns = static_cast<unsigned>(item.columns);
  if (!item.fragment) {
    if (item.rows)
      report_rows(item.a, lane % 16u, 2u * warp + lane / 16u);
    else
      report(item.a, 16u * warp + lane % 16u, lane / 16u);
  }
  for (unsigned i = lane; i < 2u * columns; i += 32u) {
    if (item.rows)
      report_rows(item.b, i % 16u, i / 16u);
    else
      report(item.b, i / 2u, i % 2u);
  }
#else
  (void)item;
#endif
}

inline void execute(const EmulatedMultiply& item) {
  report_operands(item);
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

EMULATOR_TOGETHER void matrix_commit() {
  emulator::thread_state<EmulatedMultiplies>().commit("matrix instructions");
  // Matrix instructions wait until all lanes of the warp execute them.
  emulator::converge("matrix_commit", EMULATOR_CALL);
}

template <int kPending>
EMULATOR_TOGETHER void matrix_wait() {
  // .sync.aligned: all lanes of the warp wait together, even if nothing is unfinished.
  emulator::converge("matrix_wait", EMULATOR_CALL);
  if (!emulator::thread_state<EmulatedMultiplies>().wait(kPending)) return;
  emulator::converge("matrix_wait");  // the operands of all lanes have been read
  emulator::races::products_finished();
}

// Queues a product.
inline void issue_product(const EmulatedMultiply& item) {
  report_operands(item);
  emulator::thread_state<EmulatedMultiplies>().push(item);
}

template <int kColumns>
struct MatrixMultiply {
  static_assert(kColumns % 8 == 0 && 8 <= kColumns && kColumns <= 256, "columns that wgmma has");
  template <Operand kOperand>
  static void issue(float* sums, unsigned long long a, unsigned long long b) {
    issue_product({sums, nullptr, a, b, kColumns, kOperand});
  }
  template <Operand kOperand>
  static void issue(float* sums, const unsigned (&a)[4], unsigned long long b) {
    issue_product({sums, a, 0, b, kColumns, kOperand});
  }
  template <Operand kOperand>
  static void issue_rows(float* sums, unsigned long long a, unsigned long long b) {
    static_assert(kOperand != Operand::kTf32, "rows of 32-bit numbers cannot be K");
    issue_product({sums, nullptr, a, b, kColumns, kOperand, true});
  }
};

}  // namespace tconv3d::ptx
