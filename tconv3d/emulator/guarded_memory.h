// Memory for a block's dynamic shared memory. It ends at a page that may not be touched, as nearly as its
// alignment of 1024 bytes allows; the few bytes between are filled with a known value, which is compared when
// the block ends. Under AddressSanitizer the memory comes from the heap, where every access past the end is
// detected.
#pragma once

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace emulator {
namespace {

constexpr size_t kGuardedAlignment = 1024;

#ifdef EMULATOR_ASAN

unsigned char* take_guarded(unsigned bytes, int) {
  void* memory = nullptr;
  return posix_memalign(&memory, kGuardedAlignment, bytes) ? nullptr : static_cast<unsigned char*>(memory);
}
void give_guarded_back(unsigned char* memory, unsigned) { free(memory); }
bool past_end_has_only(int, const unsigned char*, unsigned) { return true; }

#else

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Returns the bytes of all pages, with an inaccessible page before the memory and one behind it.
size_t all_pages(unsigned bytes) {
  return round_up(round_up(bytes, kGuardedAlignment), page_bytes()) + 2 * page_bytes();
}

unsigned char* take_guarded(unsigned bytes, int filled_with) {
  const size_t page = page_bytes(), all = all_pages(bytes);
  void* mapped = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const start = static_cast<unsigned char*>(mapped);
  if (mprotect(start + page, all - 2 * page, PROT_READ | PROT_WRITE)) return nullptr;
  const size_t own = round_up(bytes, kGuardedAlignment);
  unsigned char* const memory = start + all - page - own;
  memset(memory, filled_with, own);
  return memory;
}

void give_guarded_back(unsigned char* memory, unsigned bytes) {
  munmap(memory + round_up(bytes, kGuardedAlignment) + page_bytes() - all_pages(bytes), all_pages(bytes));
}

bool past_end_has_only(int value, const unsigned char* memory, unsigned bytes) {
  for (size_t i = bytes; i < round_up(bytes, kGuardedAlignment); ++i)
    if (memory[i] != value) return false;
  return true;
}

#endif

}  // namespace
}  // namespace emulator
