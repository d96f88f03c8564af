// The resources of a process (descriptors, threads, heap, verbs objects), counted without the plugin. After finalize
// the plugin must hold none.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "support/fail_nth.h"

namespace conformance {

struct ProcessResources {
  std::size_t fds = 0;
  std::size_t threads = 0;
  std::size_t heap = 0;  // bytes in use

  static ProcessResources take();
};

// Fails when the number of descriptors differs, when there are more threads than before (after a wait for threads that
// are about to end), or when the heap has grown by more than `heap_slack` bytes. Fewer threads are accepted, because
// `before` can include a thread that was joined but that the kernel still listed.
::testing::AssertionResult is_restored(const ProcessResources& before, std::size_t heap_slack);

// Objects of the counting verbs library that exist: "mr 2, qp 1"; empty when there are none.
std::string verbs_alive();
// The number of objects that were created in this process, of all kinds and of one kind.
long verbs_made();
long verbs_made(const std::string& kind);
long verbs_alive(const std::string& kind);
// Bytes that were registered in this process, and entries of the queues that were created.
long verbs_registered_bytes();
long verbs_queue_entries();
// From now on the verbs library writes the name of each object that is modified or destroyed to this descriptor.
void report_verbs(int fd);
// Selects the call of a verb that fails.
verbatim::test::FailNth& failing_verb();
// From now on `before` is called with the name of each verb, before the verb is called.
void watch_verbs(void (*before)(const char* verb));

}  // namespace conformance
