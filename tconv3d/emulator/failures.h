// The message of a failed launch: what went wrong, and where each thread was. Only runtime.cpp includes this
// file.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <utility>
#include <vector>

namespace emulator {
namespace {

std::string failure;
bool failed = false;

std::string format_text(const char* format, va_list arguments) {
  char text[2048];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

std::string format_text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_text(format, arguments);
  va_end(arguments);
  return text;
}

std::string name_of(uint3 index) { return format_text("(%u, %u, %u)", index.x, index.y, index.z); }

const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

void set_failure(std::string message) {
  if (failed) return;  // the first failure is the cause of all others
  failed = true;
  failure = std::move(message);
  if (current)
    failure += format_text("\n  in kernel %s, block %s, thread %s", emulated_kernel.name,
                           name_of(blockIdx).c_str(), name_of(current->index).c_str());
}

// Formats ascending ranks as text, for example "threads 0-31, 64".
std::string ranges(const std::vector<unsigned>& ranks) {
  std::string text = ranks.size() == 1 ? "thread " : "threads ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

bool same_text(const char* a, const char* b) { return a == b || !strcmp(a, b); }

bool same_place(const Where& a, const Where& b) {
  return a.line == b.line && same_text(a.what, b.what) && same_text(a.file, b.file);
}

std::string describe_deadlock(const std::vector<Thread>& threads) {
  std::string text =
      format_text("deadlock in kernel %s: every thread that is left waits or polls", emulated_kernel.name);
  text += "\n  block " + name_of(blockIdx) + ":";
  std::vector<std::pair<Where, std::vector<unsigned>>> groups;
  std::vector<unsigned> ended;
  for (const Thread& thread : threads) {
    if (thread.ended) {
      ended.push_back(thread.rank);
      continue;
    }
    size_t i = 0;
    while (i < groups.size() && !same_place(groups[i].first, thread.where)) ++i;
    if (i == groups.size()) groups.push_back({thread.where, {}});
    groups[i].second.push_back(thread.rank);
  }
  for (const auto& [where, ranks] : groups)
    text += format_text("\n    %s in %s at %s:%d", ranges(ranks).c_str(), where.what, file_name(where.file),
                        where.line);
  if (!ended.empty()) text += "\n    " + ranges(ended) + " ended";
  return text;
}

}  // namespace
}  // namespace emulator
