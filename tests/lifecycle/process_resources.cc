#include "process_resources.h"

#include <malloc.h>

#include <cstdlib>
#include <filesystem>

#include "conformance.h"
#include "support/counted_verbs/counted_verbs.h"
#include "support/counted_verbs/modifications.h"

namespace conformance {
namespace {

using verbatim::test::kVerbsObjectNames;
using verbatim::test::VerbsCounters;

std::size_t entries(const char* directory) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++count;
  return count;
}

VerbsCounters& counters() {
  return verbatim::test::verbs_counters();
}

}  // namespace

ProcessResources ProcessResources::take() {
  const struct mallinfo2 heap = mallinfo2();
  return {.fds = entries("/proc/self/fd"), .threads = entries("/proc/self/task"), .heap = heap.uordblks + heap.hblkhd};
}

::testing::AssertionResult is_restored(const ProcessResources& before, std::size_t heap_slack) {
  ProcessResources now;
  eventually(
      [&] {
        now = ProcessResources::take();
        return now.fds == before.fds && now.threads <= before.threads;
      },
      5s);
  const auto differs = [](const char* what, std::size_t was, std::size_t is) {
    return ::testing::AssertionFailure() << "leak of " << what << ": " << was << " before, " << is << " now";
  };
  if (now.fds != before.fds) return differs("descriptors", before.fds, now.fds);
  if (now.threads > before.threads) return differs("threads", before.threads, now.threads);
  if (now.heap > before.heap + heap_slack) return differs("bytes of heap", before.heap, now.heap);
  return ::testing::AssertionSuccess();
}

std::string verbs_alive() {
  std::string text;
  for (std::size_t i = 0; i < kVerbsObjectNames.size(); ++i) {
    if (const long alive = counters().alive[i]; alive != 0) {
      text.append(text.empty() ? "" : ", ").append(kVerbsObjectNames[i]).append(" ").append(std::to_string(alive));
    }
  }
  return text;
}

long verbs_alive(const std::string& kind) {
  long alive = 0;
  for (std::size_t i = 0; i < kVerbsObjectNames.size(); ++i) {
    if (kind == kVerbsObjectNames[i]) alive = counters().alive[i];
  }
  return alive;
}

long verbs_made(const std::string& kind) {
  long made = 0;
  for (std::size_t i = 0; i < kVerbsObjectNames.size(); ++i) {
    if (kind == kVerbsObjectNames[i]) made = counters().made[i];
  }
  return made;
}

long verbs_made() {
  long made = 0;
  for (const std::atomic<long>& count : counters().made) made += count;
  return made;
}

long verbs_registered_bytes() {
  return counters().registered_bytes;
}

long verbs_queue_entries() {
  return counters().queue_entries;
}

void report_verbs(int fd) {
  counters().report_fd = fd;
}

verbatim::test::FailNth& failing_verb() {
  return counters().fail;
}

void watch_verbs(void (*before)(const char* verb)) {
  counters().before = before;
}

}  // namespace conformance
