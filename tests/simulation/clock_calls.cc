// Clocks, sleeps and random numbers.
#include <sys/random.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <ctime>

#include "simulation/clock.h"
#include "simulation/interpose.h"

using namespace simulation;

SIMULATE(int, clock_gettime, (clockid_t clock, timespec* shown), (clock, shown))
int simulated_clock_gettime(clockid_t clock, timespec* shown) {
  step("clock_gettime");
  *shown = to_timespec(begin_of(clock) + now());
  record("clock_gettime", 0);
  return 0;
}

SIMULATE(int, gettimeofday, (timeval * shown, void* zone), (shown, zone))
int simulated_gettimeofday(timeval* shown, void* /*zone*/) {
  step("gettimeofday");
  const timespec time = to_timespec(kBeginOfRealTime + now());
  *shown = {time.tv_sec, time.tv_nsec / 1000};
  record("gettimeofday", 0);
  return 0;
}

SIMULATE(time_t, time, (time_t * shown), (shown))
time_t simulated_time(time_t* shown) {
  step("time");
  const time_t seconds = to_timespec(kBeginOfRealTime + now()).tv_sec;
  if (shown != nullptr) *shown = seconds;
  record("time", 0);
  return seconds;
}

namespace {

int sleep_until(const char* call, Time deadline) {
  step(call);
  if (deadline > now()) wait(call, 0, deadline);
  record(call, 0);
  return 0;
}

}  // namespace

SIMULATE(int, usleep, (useconds_t microseconds), (microseconds))
int simulated_usleep(useconds_t microseconds) {
  return sleep_until("usleep", now() + microseconds * kMicrosecond);
}

SIMULATE(int, nanosleep, (const timespec* duration, timespec* left), (duration, left))
int simulated_nanosleep(const timespec* duration, timespec* /*left*/) {
  return sleep_until("nanosleep", now() + duration_of(*duration));
}

SIMULATE(int, clock_nanosleep, (clockid_t clock, int flags, const timespec* value, timespec* left),
         (clock, flags, value, left))
int simulated_clock_nanosleep(clockid_t clock, int flags, const timespec* value, timespec* /*left*/) {
  const Time deadline = (flags & TIMER_ABSTIME) != 0 ? time_of(clock, *value) : now() + duration_of(*value);
  return sleep_until("clock_nanosleep", deadline);
}

namespace {

void fill(void* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i)
    static_cast<std::uint8_t*>(data)[i] = static_cast<std::uint8_t>(random_below(256));
}

}  // namespace

SIMULATE(ssize_t, getrandom, (void* data, std::size_t bytes, unsigned flags), (data, bytes, flags))
ssize_t simulated_getrandom(void* data, std::size_t bytes, unsigned /*flags*/) {
  step("getrandom");
  fill(data, bytes);
  record("getrandom", static_cast<std::int64_t>(bytes));
  return static_cast<ssize_t>(bytes);
}

SIMULATE(int, getentropy, (void* data, std::size_t bytes), (data, bytes))
int simulated_getentropy(void* data, std::size_t bytes) {
  fill(data, bytes);
  return 0;
}

SIMULATE(std::uint32_t, arc4random, (), ())
std::uint32_t simulated_arc4random() {
  return static_cast<std::uint32_t>(random_below(std::uint64_t{1} << 32));
}
