#include "exit.h"

#include <dlfcn.h>
#include <unistd.h>

#include "rma/instance.h"

namespace __gnu_cxx {
void __freeres();  // of libsupc++, which declares it in no header
}

extern "C" int __cxa_atexit(void (*handler)(void*), void* argument, void* library);
extern "C" void __cxa_finalize(void* library);

namespace verbatim::abi {

std::atomic<Context*> g_process_context{nullptr};

namespace {

// exit() runs its handlers, one of which sets g_process_exiting, before the destructors of libraries. dlclose() runs
// only the destructor.
std::atomic<bool> g_process_exiting{false};
std::atomic<bool> g_unloading{false};
std::atomic<pid_t> g_loading_pid{0};  // of the process that called init: a forked child must not close its contexts

// After this, handlers and destructors of the application run while its threads can still call the plugin. One of them
// can call dlclose. RTLD_NODELETE keeps the plugin's code mapped for the other threads.
void record_exit(void*) {
  if (g_unloading.load()) return;
  g_process_exiting.store(true);
  Dl_info plugin{};
  if (::dladdr(&g_process_exiting, &plugin) != 0) ::dlopen(plugin.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

// Unloading also closes contexts of later versions that were not finalized, because the monitor's thread must not run
// code that is unloaded. When the process exits with open comms, other threads can still use them, so nothing is
// closed.
__attribute__((destructor)) void close_contexts() {
  const bool exits = g_process_exiting.load();
  g_unloading.store(true);
  __cxa_finalize(&g_process_exiting);  // removes the exit handler, whose code is about to be unloaded
  const pid_t owner = g_loading_pid.load();
  if (owner != 0 && owner != ::getpid()) return;
  Context* context = g_process_context.load();
  if (!exits) {
    g_process_context.store(nullptr);
    rma::Instance::close_all();  // first: they use contexts
    close_all_contexts();
  } else if (context != nullptr && context->idle()) {
    g_process_context.store(nullptr);
    close_context(context);
  }
#ifdef VERBATIM_OWNS_CXX_RUNTIME
  // The plugin's own copy of the C++ runtime reserves 72 KiB for exceptions when memory is exhausted. Without this call
  // each load of the plugin would leak them.
  if (!exits) __gnu_cxx::__freeres();
#endif
}

}  // namespace

void register_exit_handler() {
  if (g_loading_pid.exchange(::getpid()) == ::getpid()) return;
  // &g_process_exiting takes the place of this library's __dso_handle: so dlclose() does not run the handler with the
  // library's destructors, and __cxa_finalize(&g_process_exiting) can remove the handler alone.
  __cxa_atexit(record_exit, nullptr, &g_process_exiting);
}

}  // namespace verbatim::abi
