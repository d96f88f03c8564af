// Threads, mutexes, condition variables, futexes: what threads wait for each other with.
//
// A mutex keeps its real state, and is only tried: so it works as its type says, and a thread that finds it locked
// waits in the simulation. A condition variable has no state of its own; its waiters are in the simulation.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <ctime>
#include <memory>

#include "simulation/clock.h"
#include "simulation/interpose.h"

using namespace simulation;

namespace {

std::uintptr_t key(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

struct Start {
  std::size_t number;
  void* (*run)(void*);
  void* argument;
};

// The destructors of the values that belong to a thread run after its function has returned, and are part of the
// simulation. This one sets itself again until it is the last, and ends the thread.
void end_after_destructors(void* rounds);
pthread_key_t end_key() {
  static const pthread_key_t key = [] {
    pthread_key_t made{};
    pthread_key_create(&made, end_after_destructors);
    return made;
  }();
  return key;
}
void end_after_destructors(void* rounds) {
  const auto left = reinterpret_cast<std::uintptr_t>(rounds) - 1;
  if (left != 0) {
    pthread_setspecific(end_key(), reinterpret_cast<void*>(left));
  } else {
    end_thread();
  }
}

void* run_thread(void* argument) {
  const std::unique_ptr<Start> start(static_cast<Start*>(argument));
  enter_thread(start->number);
  pthread_setspecific(end_key(), reinterpret_cast<void*>(std::uintptr_t{PTHREAD_DESTRUCTOR_ITERATIONS}));
  record("begin of the thread", 0);
  return start->run(start->argument);
}

}  // namespace

SIMULATE(int, pthread_create,
         (pthread_t * thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument),
         (thread, attributes, run, argument))
int simulated_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  step("pthread_create");
  const std::size_t number = add_thread();
  auto start = std::make_unique<Start>(Start{number, run, argument});
  const int error = next_pthread_create(thread, attributes, run_thread, start.get());
  if (error == 0) {
    static_cast<void>(start.release());
    set_handle(number, *thread);
  } else {
    remove_thread(number);
  }
  record("pthread_create", error == 0 ? static_cast<std::int64_t>(number) : -error);
  return error;
}

SIMULATE(int, pthread_join, (pthread_t thread, void** result), (thread, result))
int simulated_pthread_join(pthread_t thread, void** result) {
  step("pthread_join");
  wait_for_end(thread);
  record("pthread_join", 0);
  return next_pthread_join(thread, result);
}

SIMULATE(int, pthread_setname_np, (pthread_t thread, const char* name), (thread, name))
int simulated_pthread_setname_np(pthread_t thread, const char* name) {
  set_name(thread, name);
  return next_pthread_setname_np(thread, name);
}

SIMULATE(int, sched_yield, (), ())
int simulated_sched_yield() {
  poll_in_vain("sched_yield");
  record("sched_yield", 0);
  return 0;
}

SIMULATE(int, pthread_mutex_trylock, (pthread_mutex_t * mutex), (mutex))
int simulated_pthread_mutex_trylock(pthread_mutex_t* mutex) {
  step("pthread_mutex_trylock");
  const int error = next_pthread_mutex_trylock(mutex);
  record("pthread_mutex_trylock", error);
  return error;
}

SIMULATE(int, pthread_mutex_lock, (pthread_mutex_t * mutex), (mutex))
int simulated_pthread_mutex_lock(pthread_mutex_t* mutex) {
  step("pthread_mutex_lock");
  int error = next_pthread_mutex_trylock(mutex);
  for (; error == EBUSY; error = next_pthread_mutex_trylock(mutex)) wait("pthread_mutex_lock", key(mutex), kNever);
  record("pthread_mutex_lock", error);
  return error;
}

SIMULATE(int, pthread_mutex_unlock, (pthread_mutex_t * mutex), (mutex))
int simulated_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int error = next_pthread_mutex_unlock(mutex);
  wake(key(mutex));
  step("pthread_mutex_unlock");
  record("pthread_mutex_unlock", error);
  return error;
}

namespace {

// Unlocking and waiting are one step: no signal comes between them.
int wait_for_condition(const char* call, pthread_cond_t* condition, pthread_mutex_t* mutex, Time deadline) {
  step(call);
  next_pthread_mutex_unlock(mutex);
  wake(key(mutex));
  const Wake woken = wait(call, key(condition), deadline);
  while (next_pthread_mutex_trylock(mutex) == EBUSY) wait(call, key(mutex), kNever);
  const int result = woken == Wake::kByDeadline ? ETIMEDOUT : 0;
  record(call, result);
  return result;
}

}  // namespace

SIMULATE(int, pthread_cond_wait, (pthread_cond_t * condition, pthread_mutex_t* mutex), (condition, mutex))
int simulated_pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return wait_for_condition("pthread_cond_wait", condition, mutex, kNever);
}

// Without an attribute, which nobody here sets, the clock is CLOCK_REALTIME.
SIMULATE(int, pthread_cond_timedwait, (pthread_cond_t * condition, pthread_mutex_t* mutex, const timespec* until),
         (condition, mutex, until))
int simulated_pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  return wait_for_condition("pthread_cond_timedwait", condition, mutex, time_of(CLOCK_REALTIME, *until));
}

SIMULATE(int, pthread_cond_clockwait,
         (pthread_cond_t * condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until),
         (condition, mutex, clock, until))
int simulated_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                     const timespec* until) {
  return wait_for_condition("pthread_cond_clockwait", condition, mutex, time_of(clock, *until));
}

namespace {

int wake_waiters(const char* call, const pthread_cond_t* condition, std::size_t count) {
  step(call);
  const std::size_t woken = wake(key(condition), count);
  if (woken != 0) note_activity();
  record(call, static_cast<std::int64_t>(woken));
  return 0;
}

}  // namespace

SIMULATE(int, pthread_cond_signal, (pthread_cond_t * condition), (condition))
int simulated_pthread_cond_signal(pthread_cond_t* condition) {
  return wake_waiters("pthread_cond_signal", condition, 1);
}

SIMULATE(int, pthread_cond_broadcast, (pthread_cond_t * condition), (condition))
int simulated_pthread_cond_broadcast(pthread_cond_t* condition) {
  return wake_waiters("pthread_cond_broadcast", condition, SIZE_MAX);
}

// The C library waits in the kernel for a thread that runs the function: while it does, others wait here.
SIMULATE(int, pthread_once, (pthread_once_t * once, void (*run)()), (once, run))
int simulated_pthread_once(pthread_once_t* once, void (*run)()) {
  struct Running {
    pthread_once_t* once;
    Running* next;
  };
  static Running* all = nullptr;
  const auto is_running = [&] {
    const Running* at = all;
    while (at != nullptr && at->once != once) at = at->next;
    return at != nullptr;
  };
  while (is_running()) wait("pthread_once", key(once), kNever);
  Running running{once, all};
  all = &running;
  const auto leave = [&] {
    Running** link = &all;
    while (*link != &running) link = &(*link)->next;
    *link = running.next;
    wake(key(once));
  };
  int error = 0;
  try {
    error = next_pthread_once(once, run);
  } catch (...) {  // std::call_once passes exceptions on
    leave();
    throw;
  }
  leave();
  return error;
}

namespace {

long fail_with(int error) {
  errno = error;
  return -1;
}

long simulated_futex(std::uint32_t* word, int operation, std::uint32_t value, const timespec* timeout) {
  // A word that processes share has another address in each. All who wait for such a word look again.
  const bool is_private = (operation & FUTEX_PRIVATE_FLAG) != 0;
  const std::uintptr_t object = is_private ? key(word) : kAnySharedFutex;
  switch (operation & FUTEX_CMD_MASK) {
    case FUTEX_WAIT: {
      step("futex wait");
      if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) {
        record("futex wait", -EAGAIN);
        return fail_with(EAGAIN);
      }
      const Time deadline = timeout == nullptr ? kNever : now() + duration_of(*timeout);
      const bool late = wait("futex wait", object, deadline) == Wake::kByDeadline;
      record("futex wait", late ? -ETIMEDOUT : 0);
      return late ? fail_with(ETIMEDOUT) : 0;
    }
    case FUTEX_WAKE: {
      step("futex wake");
      const auto woken = static_cast<long>(wake(object, is_private ? value : SIZE_MAX));
      if (woken != 0) note_activity();
      record("futex wake", woken);
      return woken;
    }
    default:
      fail_run("an operation of futex that the simulation does not know");
  }
}

}  // namespace

// Passing on an argument that the caller did not pass is harmless.
SIMULATE(long, syscall, (long number, long a, long b, long c, long d, long e, long f), (number, a, b, c, d, e, f))
long simulated_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number == SYS_connect) {
    return ::connect(static_cast<int>(a), reinterpret_cast<const sockaddr*>(b), static_cast<socklen_t>(c));
  }
  if (number != SYS_futex) return next_syscall(number, a, b, c, d, e, f);
  return simulated_futex(reinterpret_cast<std::uint32_t*>(a), static_cast<int>(b), static_cast<std::uint32_t>(c),
                         reinterpret_cast<const timespec*>(d));
}
