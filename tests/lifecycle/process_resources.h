// What a process holds, counted from outside of the plugin: nothing may be left of it when it has been finalized.
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

// Fails when the process has other descriptors or more threads than before, after a moment for threads that are
// leaving, or a heap larger by more than `heap_slack` bytes. Fewer threads are no fault: the system still lists, for a
// moment, one that was joined just before the first census.
::testing::AssertionResult is_restored(const ProcessResources& before, std::size_t heap_slack);

// Of the verbs library that counts: "mr 2, qp 1"; empty when no object is alive.
std::string verbs_alive();
// Objects of every kind that were ever made.
long verbs_made();
long verbs_made(const std::string& kind);
long verbs_alive(const std::string& kind);
// How many QPs were ever given a path with this traffic class, and with any.
long verbs_paths(std::uint8_t traffic_class);
long verbs_paths();
// From now on what is destroyed is named on this descriptor.
void report_verbs(int fd);
// The verb that is to fail.
verbatim::test::FailNth& failing_verb();
// From now on called with the name of each verb before it.
void watch_verbs(void (*before)(const char* verb));

}  // namespace conformance
