// A race detector for shared memory (TCONV3D_EMULATOR_RACES): it fails where one thread accesses what another
// has written, or writes what another has accessed, and no barrier orders the two, in whatever order the
// emulator happens to run them.
//
// Every thread has a vector clock: entry i is the last epoch of agent i whose accesses are known to be over.
// An agent is a thread, the copy engine on behalf of one mbarrier, or the tensor core of one warp. Barriers
// join clocks. Shuffles, votes, ldmatrix and mma do not, because they order no memory accesses; __syncwarp
// does. A cell of two bytes remembers its last write and the reads since then. The host's compiler reports
// the kernel's own loads and stores (-fsanitize=thread; the functions that it calls are at the end of this
// file); emulated instructions report theirs.
//
// Lanes of a warp may store to one place by one instruction, without a barrier, and each of them may read it
// again: kernels do so where all of them store the same number. That they do is for shuffled orders of
// threads to show, which change the result otherwise.
//
// Tensor cores and the copy engine read shared memory through the async proxy: an ordinary store reaches them
// only if a fence.proxy.async lies between the store and the read. A second clock per thread says which
// stores have been fenced. Only runtime.cpp includes this file.
#pragma once

#ifdef EMULATOR_RACES

#include <map>
#include <vector>

namespace emulator {
namespace {

constexpr unsigned kCellBytes = 2;
constexpr unsigned kNobody = 0xFFFFu;
constexpr unsigned kMostBarriers = 64;  // agents of the copy engine
constexpr unsigned kMostWarps = 32;     // agents of tensor cores

using Clock = std::vector<unsigned>;

void join(Clock& to, const Clock& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = to[i] > from[i] ? to[i] : from[i];
}

struct Cell {
  unsigned write_epoch = 0, read_epoch = 0;
  unsigned short writer = kNobody, reader = kNobody;
  unsigned writers = 0;         // lanes of the writer's warp whose stores by one instruction were the last
  bool ignored = false;         // the cell holds a barrier, or a word that threads poll
  unsigned* readers = nullptr;  // epochs by agent, where several agents read without an order between them
  const void *write_place = nullptr, *read_place = nullptr;
};

struct BarrierClocks {
  unsigned agent;
  Clock arrived, arrived_fenced;            // Clocks of the threads that have arrived in this phase.
  Clock completed[2], completed_fenced[2];  // Clocks of the last completed phase of each parity.
};

struct Detector {
  unsigned threads = 0, agents = 0;
  std::vector<Clock> known, fenced;  // Clocks by thread.
  std::vector<Cell> cells;           // Cells of dynamic shared memory, then of static shared memory.
  unsigned dynamic_cells = 0;
  std::map<unsigned, BarrierClocks> barriers;  // by address
  std::vector<unsigned> copies, products;      // epochs of the copy engine by barrier, of products by thread
  bool any_fence = false;

  ~Detector() {
    for (Cell& cell : cells) delete[] cell.readers;
  }
};
Detector* detector = nullptr;

void start_detector(unsigned threads, unsigned dynamic_bytes, size_t static_bytes) {
  delete detector;
  detector = new Detector();
  Detector& d = *detector;
  d.threads = threads;
  d.agents = threads + kMostBarriers + kMostWarps;
  d.known.assign(threads, Clock(d.agents, 0));
  d.fenced.assign(threads, Clock(d.agents, 0));
  for (unsigned t = 0; t < threads; ++t) d.known[t][t] = 1;
  d.dynamic_cells = (dynamic_bytes + kCellBytes - 1) / kCellBytes;
  d.cells.resize(d.dynamic_cells + (static_bytes + kCellBytes - 1) / kCellBytes);
  d.copies.assign(kMostBarriers, 0);
  d.products.assign(threads, 0);
}

void end_detector() {
  delete detector;
  detector = nullptr;
}

// Finds the cells of an access; returns false if it is not in shared memory.
bool find_cells(const void* pointer, size_t bytes, size_t& first, size_t& end) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  const Block& block = *current->block;
  size_t offset = static_cast<size_t>(byte - block.dynamic_shared), before = 0;
  if (offset >= block.dynamic_shared_bytes) {
    offset = static_cast<size_t>(byte - static_shared.start);
    if (offset >= static_shared.bytes) return false;
    before = detector->dynamic_cells;
  }
  first = before + offset / kCellBytes;
  end = before + (offset + bytes + kCellBytes - 1) / kCellBytes;
  if (end > detector->cells.size()) end = detector->cells.size();
  return true;
}

std::string name_of_agent(unsigned agent) {
  const unsigned threads = detector->threads;
  if (agent < threads) return format_text("thread %u", agent);
  if (agent < threads + kMostBarriers) return "a bulk copy";
  return format_text("a matrix product of warp %u", agent - threads - kMostBarriers);
}

[[noreturn]] void report(const Cell& cell, const char* does, const void* place, unsigned other,
                         const char* did, const void* other_place) {
  const size_t index = static_cast<size_t>(&cell - detector->cells.data());
  const bool is_static = index >= detector->dynamic_cells;
  const std::string who = name_of_agent(other), here = name_of_place(place),
                    there = name_of_place(other_place);
  fail(
      "race in %s shared memory at offset %zu: thread %u %s at %s what %s %s at %s, and no barrier orders "
      "the two",
      is_static ? "static" : "dynamic", (index - (is_static ? detector->dynamic_cells : 0)) * kCellBytes,
      current->rank, does, here.c_str(), who.c_str(), did, there.c_str());
}

// Whether the running thread is in the warp of the thread that last wrote.
bool in_warp_of_writer(const Cell& cell) {
  return cell.writer < detector->threads && cell.writer / 32u == current->rank / 32u;
}

void check_against_write(const Cell& cell, const char* does, const void* place) {
  if (in_warp_of_writer(cell) && cell.writers >> current->rank % 32u & 1u) return;
  if (cell.writer != kNobody && detector->known[current->rank][cell.writer] < cell.write_epoch)
    report(cell, does, place, cell.writer, "wrote", cell.write_place);
}

void check_against_reads(const Cell& cell, const void* place) {
  const Clock& known = detector->known[current->rank];
  if (cell.readers) {
    for (unsigned agent = 0; agent < detector->agents; ++agent)
      if (known[agent] < cell.readers[agent]) report(cell, "writes", place, agent, "read", cell.read_place);
  } else if (cell.reader != kNobody && known[cell.reader] < cell.read_epoch) {
    report(cell, "writes", place, cell.reader, "read", cell.read_place);
  }
}

void note_read(Cell& cell, unsigned agent, unsigned epoch, const void* place) {
  const Clock& known = detector->known[current->rank];
  cell.read_place = place;
  if (cell.readers) {
    cell.readers[agent] = epoch;
  } else if (cell.reader == kNobody || cell.reader == agent || known[cell.reader] >= cell.read_epoch) {
    cell.reader = static_cast<unsigned short>(agent);
    cell.read_epoch = epoch;
  } else {
    cell.readers = new unsigned[detector->agents]();
    cell.readers[cell.reader] = cell.read_epoch;
    cell.readers[agent] = epoch;
  }
}

void note_write(Cell& cell, unsigned agent, unsigned epoch, const void* place) {
  const unsigned lane = agent < detector->threads ? 1u << agent % 32u : 0u;
  cell.writers = in_warp_of_writer(cell) && cell.write_place == place ? cell.writers | lane : lane;
  delete[] cell.readers;
  cell.readers = nullptr;
  cell.reader = kNobody;
  cell.writer = static_cast<unsigned short>(agent);
  cell.write_epoch = epoch;
  cell.write_place = place;
}

void check_access(const void* pointer, size_t bytes, bool writes, const void* place) {
  size_t first, end;
  if (!detector || !current || !find_cells(pointer, bytes, first, end)) return;
  const unsigned self = current->rank, epoch = detector->known[self][self];
  for (size_t i = first; i < end; ++i) {
    Cell& cell = detector->cells[i];
    if (cell.ignored) continue;
    const bool by_one_instruction = writes && in_warp_of_writer(cell) && cell.write_place == place;
    if (!by_one_instruction) check_against_write(cell, writes ? "writes" : "reads", place);
    if (writes) {
      check_against_reads(cell, place);
      note_write(cell, self, epoch, place);
    } else {
      note_read(cell, self, epoch, place);
    }
  }
}

BarrierClocks& clocks_of(unsigned address) {
  const auto found = detector->barriers.find(address);
  if (found == detector->barriers.end()) fail("the barrier at %u has not been initialized", address);
  return found->second;
}

// Joins the clocks of threads that have met, and begins a new epoch of each.
void join_threads(unsigned first, unsigned count, unsigned lanes) {
  if (!detector) return;
  Detector& d = *detector;
  Clock all(d.agents, 0), all_fenced(d.agents, 0);
  const auto taking_part = [&](unsigned i) {
    return first + i < d.threads && (count > 32 || lanes >> i & 1u);
  };
  for (unsigned i = 0; i < count; ++i) {
    if (!taking_part(i)) continue;
    join(all, d.known[first + i]);
    if (d.any_fence) join(all_fenced, d.fenced[first + i]);
  }
  for (unsigned i = 0; i < count; ++i) {
    if (!taking_part(i)) continue;
    d.known[first + i] = all;
    if (d.any_fence) d.fenced[first + i] = all_fenced;
    d.known[first + i][first + i] += 1;
  }
}

}  // namespace

namespace races {

void read(const void* pointer, unsigned bytes) {
  check_access(pointer, bytes, false, __builtin_return_address(0));
}
void write(const void* pointer, unsigned bytes) {
  check_access(pointer, bytes, true, __builtin_return_address(0));
}

void read_by_async_proxy(const void* pointer, unsigned bytes, bool by_product) {
  const void* place = __builtin_return_address(0);
  size_t first, end;
  if (!find_cells(pointer, bytes, first, end)) return;
  Detector& d = *detector;
  const unsigned self = current->rank;
  const unsigned agent = by_product ? d.threads + kMostBarriers + self / 32 : self;
  const unsigned epoch = by_product ? d.products[self] + 1 : d.known[self][self];
  for (size_t i = first; i < end; ++i) {
    Cell& cell = d.cells[i];
    if (cell.ignored) continue;
    check_against_write(cell, "reads", place);
    if (cell.writer < d.threads && d.fenced[self][cell.writer] < cell.write_epoch)
      report(cell, "reads through the async proxy, without fence.proxy.async,", place, cell.writer, "wrote",
             cell.write_place);
    note_read(cell, agent, epoch, place);
  }
}

void products_finished() {
  Detector& d = *detector;
  const unsigned self = current->rank;
  d.known[self][d.threads + kMostBarriers + self / 32] = ++d.products[self];
}

void write_by_copy_engine(const void* pointer, unsigned bytes, unsigned barrier) {
  const void* place = __builtin_return_address(0);
  size_t first, end;
  if (!find_cells(pointer, bytes, first, end)) return;
  BarrierClocks& clocks = clocks_of(barrier);
  const unsigned agent = detector->threads + clocks.agent, epoch = ++detector->copies[clocks.agent];
  for (size_t i = first; i < end; ++i) {
    Cell& cell = detector->cells[i];
    check_against_write(cell, "writes", place);
    check_against_reads(cell, place);
    note_write(cell, agent, epoch, place);
  }
  clocks.arrived[agent] = epoch;
}

void ignore(const void* pointer, unsigned bytes) {
  size_t first, end;
  if (!find_cells(pointer, bytes, first, end)) return;
  for (size_t i = first; i < end; ++i) detector->cells[i].ignored = true;
}

void fence_async_proxy() {
  const unsigned self = current->rank;
  detector->any_fence = true;
  join(detector->fenced[self], detector->known[self]);
  detector->known[self][self] += 1;
}

void init_barrier(unsigned address) {
  Detector& d = *detector;
  ignore(shared_pointer(address, 8), 8);
  const auto found = d.barriers.find(address);
  const auto number =
      static_cast<unsigned>(found == d.barriers.end() ? d.barriers.size() : found->second.agent);
  if (number >= kMostBarriers) fail("more than %u barriers in a block", kMostBarriers);
  const Clock none(d.agents, 0);
  d.barriers[address] = {number, none, none, {none, none}, {none, none}};
}

void arrive(unsigned address) {
  const unsigned self = current->rank;
  BarrierClocks& clocks = clocks_of(address);
  join(clocks.arrived, detector->known[self]);
  join(clocks.arrived_fenced, detector->fenced[self]);
  detector->known[self][self] += 1;
}

void complete_phase(unsigned address, unsigned parity) {
  BarrierClocks& clocks = clocks_of(address);
  clocks.completed[parity] = clocks.arrived;
  clocks.completed_fenced[parity] = clocks.arrived_fenced;
}

void pass(unsigned address, unsigned parity) {
  const unsigned self = current->rank;
  const BarrierClocks& clocks = clocks_of(address);
  join(detector->known[self], clocks.completed[parity]);
  join(detector->fenced[self], clocks.completed_fenced[parity]);
}

void meet(unsigned first, unsigned count) { join_threads(first, count, 0); }

}  // namespace races
}  // namespace emulator

#define EMULATOR_TSAN(name, bytes, writes)                                                   \
  extern "C" __attribute__((visibility("hidden"))) void __tsan_##name(const void* pointer) { \
    emulator::check_access(pointer, bytes, writes, __builtin_return_address(0));             \
  }
#define EMULATOR_TSAN_SIZES(prefix, name, writes) \
  EMULATOR_TSAN(prefix##name##1, 1, writes)       \
  EMULATOR_TSAN(prefix##name##2, 2, writes)       \
  EMULATOR_TSAN(prefix##name##4, 4, writes)       \
  EMULATOR_TSAN(prefix##name##8, 8, writes)       \
  EMULATOR_TSAN(prefix##name##16, 16, writes)
EMULATOR_TSAN_SIZES(, read, false)
EMULATOR_TSAN_SIZES(, write, true)
EMULATOR_TSAN_SIZES(unaligned_, read, false)
EMULATOR_TSAN_SIZES(unaligned_, write, true)
extern "C" {
__attribute__((visibility("hidden"))) void __tsan_read_range(const void* pointer, unsigned long bytes) {
  emulator::check_access(pointer, bytes, false, __builtin_return_address(0));
}
__attribute__((visibility("hidden"))) void __tsan_write_range(const void* pointer, unsigned long bytes) {
  emulator::check_access(pointer, bytes, true, __builtin_return_address(0));
}
__attribute__((visibility("hidden"))) void __tsan_init() {}
__attribute__((visibility("hidden"))) void __tsan_func_entry(void*) {}
__attribute__((visibility("hidden"))) void __tsan_func_exit() {}
__attribute__((visibility("hidden"))) void __tsan_vptr_update(void**, void*) {}
__attribute__((visibility("hidden"))) void __tsan_vptr_read(void**) {}
}

#else

namespace emulator {
namespace {

void start_detector(unsigned, unsigned, size_t) {}
void end_detector() {}
void join_threads(unsigned, unsigned, unsigned) {}

}  // namespace
}  // namespace emulator

#endif
