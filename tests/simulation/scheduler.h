// The order of a simulated run: which thread goes on, and what time it is. Both follow from one seed.
//
// One thread runs at a time: the one that has the turn. The functions of libc that the simulation replaces call step(),
// which lets time pass and may give the turn to another thread, and wait(), which gives it away until another thread
// wakes this one or its deadline has come. When every thread waits, or has polled in vain, time goes to the next
// deadline.
//
// Only the thread with the turn touches the state, so it needs no lock. It lies in memory that the process which
// started the run can read after a crash.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace simulation {

using Time = std::uint64_t;  // nanoseconds since the run began
constexpr Time kNever = ~Time{0};
constexpr Time kMicrosecond = 1'000;
constexpr Time kMillisecond = 1'000'000;
constexpr Time kSecond = 1'000'000'000;

constexpr std::size_t kMostProcessesThatDie = 16;

struct Plan {
  std::uint64_t seed = 1;
  std::uint64_t order = 0;      // with another number, the threads have another order
  std::uint64_t addresses = 0;  // with another number, what the processes allocate lies elsewhere
  bool trace = false;           // one line on stderr for each event
  Time limit = 3600 * kSecond;  // a run that takes longer has failed
  // By process: the step, from 1, at which it ends as if it were killed; 0: it does not.
  std::array<std::uint64_t, kMostProcessesThatDie> dies_at{};
};

// What the starting process learns of a run.
struct Outcome {
  std::uint64_t hash = 0;  // of all events: thread, call, time, result
  std::uint64_t events = 0;
  std::uint64_t switches = 0;  // how often another thread got the turn
  Time ended = 0;
};

enum class Wake { kByThread, kByDeadline };

// A run of this number of processes, for the process that starts it. Each of them is a child that has called
// enter_process; its first thread has the number of the process.
void prepare(const Plan& plan, std::size_t processes);
void begin();  // gives the turn to one of them
Outcome outcome();
// A process has ended, and others are left: gives its turn to one of them. False: nobody can go on, and stderr says
// why.
bool pass_on_turn_of(std::size_t process);

// The calling thread, which is the only one of this process, waits for the turn.
void enter_process(std::size_t process);
std::size_t own_process();
// Whether it has ended at the step that was planned, and since when; kNever: it has not.
Time death_of(std::size_t process);
constexpr int kExitOfDeath = 3;

// The number of other threads of this process that have not ended.
std::size_t threads_left();

// Whether the calling thread takes part. The functions below are for threads that do.
bool is_simulated();

Time now();
// A number below `bound`, which is not 0.
std::uint64_t random_below(std::uint64_t bound);

// A point where another thread may get the turn. Time passes.
void step(const char* call);
// An event of the run.
void record(const char* call, std::int64_t result);
// What is waited for: an address in this process, or one of these, which are the same in all processes.
constexpr std::uintptr_t kAnyDescriptor = 1;
constexpr std::uintptr_t kAnySharedFutex = 2;
// Gives the turn away.
Wake wait(const char* call, std::uintptr_t object, Time deadline);
// How many threads were woken, at most `count` of those that wait for `object`. The seed chooses which.
std::size_t wake(std::uintptr_t object, std::size_t count = SIZE_MAX);
// The thread has found nothing to do, and goes on when others have had the turn, or later.
void poll_in_vain(const char* call);
// What others poll for may have come.
void note_progress();
// Likewise, but threads that only wake each other go on for ever: when nothing else has happened for long, neither this
// nor a step of a thread is a reason for others to poll sooner again.
void note_activity();

// While such an object exists, step() does not give the turn away: the thread holds a lock of the loader.
class KeepTurn {
 public:
  KeepTurn();
  ~KeepTurn();
  KeepTurn(const KeepTurn&) = delete;
  KeepTurn& operator=(const KeepTurn&) = delete;
};

// The parts of the life of a thread, called by those that start, run and join it.
std::size_t add_thread();
void remove_thread(std::size_t number);  // it could not be started
void enter_thread(std::size_t number);   // waits for the turn
void end_thread();                       // gives the turn away for ever
void set_handle(std::size_t number, pthread_t handle);
void set_name(pthread_t handle, const char* name);
// Returns when the thread with this handle has given the turn away for ever.
void wait_for_end(pthread_t handle);

// Ends the process with a line that says why, and what each thread waits for.
[[noreturn]] void fail_run(const char* why);
// What each thread does, on stderr.
void print_threads();

}  // namespace simulation
