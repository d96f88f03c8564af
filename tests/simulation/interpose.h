// Replaces a function of libc for the threads that take part in a simulation. The program defines the function itself,
// so that the plugin and softverbs find it before the C library's; other threads get the original.
#pragma once

#include "simulation/scheduler.h"
#include "support/next_function.h"

// The function is defined under another C++ name, because the headers of the C library declare it with other
// specifiers. simulated_NAME follows. The original is resolved before main: a dlsym later could wait for the lock of
// the loader. NOLINTBEGIN(bugprone-macro-parentheses): a list of parameters takes no more parentheses
#define SIMULATE(result, symbol, parameters, arguments)                                                            \
  static result(*next_##symbol) parameters = nullptr;                                                              \
  static result simulated_##symbol parameters;                                                                     \
  extern "C" __attribute__((visibility("default"))) result interposed_##symbol parameters __asm__(#symbol);        \
  result interposed_##symbol parameters {                                                                          \
    if (simulation::is_simulated()) return simulated_##symbol arguments;                                           \
    if (next_##symbol == nullptr) next_##symbol = verbatim::test::next_function<decltype(next_##symbol)>(#symbol); \
    return next_##symbol arguments;                                                                                \
  }                                                                                                                \
  __attribute__((constructor)) static void find_##symbol() {                                                       \
    next_##symbol = verbatim::test::next_function<decltype(next_##symbol)>(#symbol);                               \
  }
// NOLINTEND(bugprone-macro-parentheses)
