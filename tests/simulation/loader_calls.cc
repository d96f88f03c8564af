// The loader runs constructors and destructors under a lock of its own, on which another thread would wait in the
// kernel: the thread keeps the turn meanwhile, unless it must wait itself.
#include <dlfcn.h>

#include "simulation/interpose.h"

using namespace simulation;

SIMULATE(void*, dlopen, (const char* name, int flags), (name, flags))
void* simulated_dlopen(const char* name, int flags) {
  const KeepTurn keep;
  return next_dlopen(name, flags);
}

SIMULATE(int, dlclose, (void* library), (library))
int simulated_dlclose(void* library) {
  const KeepTurn keep;
  return next_dlclose(library);
}
