// Functions that may wait in the kernel, or read a clock, and that nothing here calls. If a change of the plugin or of
// softverbs calls one, the run ends with its name, and the simulation learns it.
#include "simulation/descriptors.h"
#include "simulation/interpose.h"

// The parameters do not matter: the function does not return.
#define REFUSE(symbol)                                                                         \
  SIMULATE(long, symbol, (long a, long b, long c, long d, long e, long f), (a, b, c, d, e, f)) \
  long simulated_##symbol(long, long, long, long, long, long) {                                \
    simulation::fail_run(#symbol " was called, which the simulation does not know");           \
  }

// libstdc++ calls these for files.
#define REFUSE_DESCRIPTOR(symbol)                                                                             \
  SIMULATE(long, symbol, (int fd, long a, long b), (fd, a, b))                                                \
  long simulated_##symbol(int fd, long a, long b) {                                                           \
    if (!simulation::descriptors().is_known(fd)) return next_##symbol(fd, a, b);                              \
    simulation::fail_run(#symbol " was called with a descriptor, for which the simulation has no such call"); \
  }

REFUSE_DESCRIPTOR(readv)
REFUSE_DESCRIPTOR(writev)

REFUSE(accept)
REFUSE(dup)
REFUSE(dup2)
REFUSE(epoll_pwait)
REFUSE(epoll_pwait2)
REFUSE(fork)
REFUSE(getaddrinfo)
REFUSE(pause)
REFUSE(pipe)
REFUSE(popen)
REFUSE(posix_spawn)
REFUSE(posix_spawnp)
REFUSE(ppoll)
REFUSE(pselect)
REFUSE(pthread_barrier_wait)
REFUSE(pthread_cancel)
REFUSE(pthread_clockjoin_np)
REFUSE(pthread_exit)
REFUSE(pthread_kill)
REFUSE(pthread_mutex_clocklock)
REFUSE(pthread_mutex_timedlock)
REFUSE(pthread_rwlock_rdlock)
REFUSE(pthread_rwlock_wrlock)
REFUSE(pthread_spin_lock)
REFUSE(pthread_timedjoin_np)
REFUSE(pthread_yield)
REFUSE(recvfrom)
REFUSE(recvmmsg)
REFUSE(recvmsg)
REFUSE(select)
REFUSE(sem_clockwait)
REFUSE(sem_timedwait)
REFUSE(sem_wait)
REFUSE(sendmmsg)
REFUSE(sendmsg)
REFUSE(sendto)
REFUSE(sigtimedwait)
REFUSE(sigwait)
REFUSE(sigwaitinfo)
REFUSE(sleep)
REFUSE(socketpair)
REFUSE(system)
REFUSE(thrd_create)
REFUSE(timer_create)
REFUSE(vfork)
REFUSE(wait4)
REFUSE(waitpid)
