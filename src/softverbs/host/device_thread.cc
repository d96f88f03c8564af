#include "softverbs/host/device_thread.h"

#include <pthread.h>
#include <signal.h>

namespace verbatim::softverbs {

int start_thread(const char* name, void* (*run)(void*), void* argument) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const int error = pthread_create(&thread, nullptr, run, argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) return error;
  pthread_setname_np(thread, name);
  pthread_detach(thread);
  return 0;
}

}  // namespace verbatim::softverbs
