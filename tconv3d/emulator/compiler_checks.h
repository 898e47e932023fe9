// Handlers of the checks that the host's compiler puts before accesses (-fsanitize=alignment,bounds): each
// ends the launch with a message. A GPU faults at a vector whose address is no multiple of its size; CPUs do
// not.
//
// The compiler defines the layout of the data and the names of the functions. UndefinedBehaviorSanitizer has
// handlers of its own. Only runtime.cpp includes this file.
#pragma once

#ifndef EMULATOR_UBSAN

namespace {

struct CheckedPlace {
  const char* file;
  unsigned line, column;
};
struct CheckedType {
  unsigned short kind, info;
  char name[1];
};
struct CheckedAccess {
  CheckedPlace place;
  const CheckedType* type;
  unsigned char log_alignment, kind;
};
struct CheckedIndex {
  CheckedPlace place;
  const CheckedType *array, *index;
};

}  // namespace

extern "C" [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const CheckedAccess* access,
                                                                   const void* address) {
  emulator::fail("misaligned address: %p is no multiple of %u bytes, in the access to %s at %s:%u", address,
                 1u << access->log_alignment, access->type->name, emulator::file_name(access->place.file),
                 access->place.line);
}

extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(const CheckedIndex* index,
                                                                unsigned long value) {
  emulator::fail("index %ld is out of bounds of %s at %s:%u", static_cast<long>(value), index->array->name,
                 emulator::file_name(index->place.file), index->place.line);
}

#endif
