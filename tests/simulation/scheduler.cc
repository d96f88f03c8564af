#include "simulation/scheduler.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "support/next_function.h"

namespace simulation {
namespace {

constexpr std::size_t kMaxThreads = 1024;
// A call takes this time and up to as much again.
constexpr Time kCallTime = 60;
// A thread that polled this often without an event of another one does so in vain.
constexpr unsigned kVainPolls = 2;
// By which time goes on while threads poll, from the first time to the last: it doubles until something happens. When
// nothing has happened for long, it is a tenth of that time at most.
constexpr Time kFirstPause = 2 * kMicrosecond;
constexpr Time kLastPause = 10 * kMillisecond;
constexpr Time kLongestPause = 100 * kMillisecond;
constexpr Time kLong = 10 * kLastPause;

constexpr const char* kBeyondLimit = "the run has not ended within the limit of virtual time";

// kUnused: also of a thread that was joined. Another one gets its number.
enum class State { kUnused, kRunnable, kWaiting, kPolling, kEnded };

struct Thread {
  std::atomic<std::uint32_t> turn{0};  // a futex
  State state = State::kUnused;
  std::size_t process = 0;
  Wake woken_by = Wake::kByThread;
  char call[24] = "its begin";  // a copy: this process may not have the library that has the name
  std::uintptr_t object = 0;
  Time deadline = kNever;
  bool polls = false;                 // has found nothing, and has done nothing else since
  std::uint64_t polled_activity = 0;  // Run::activity when it polled last
  unsigned vain_polls = 0;            // since then
  unsigned keeps_turn = 0;
  pthread_t handle{};
  char name[16] = "";
};

struct Run {
  Plan plan;
  Outcome outcome;
  Time now = 0;
  std::uint64_t random_state = 0;
  std::uint64_t switches_one_in = 1;  // of the steps; each seed has its own
  std::uint64_t activity = 0;         // counts what a thread that polls may have to look at
  Time pause = kFirstPause;
  Time progress_at = 0;  // when something has happened last
  Time polled_at = 0;    // when those that poll have looked again because of the time
  std::array<std::uint64_t, kMostProcessesThatDie> steps{};  // of each process
  std::array<Time, kMostProcessesThatDie> deaths{};          // 0: it has not died
  std::size_t running = 0;                                   // the thread that has the turn
  std::size_t thread_count = 0;
  std::array<Thread, kMaxThreads> threads;
};

Run* g_run = nullptr;
std::size_t g_process = 0;
thread_local Thread* self = nullptr;

// The simulation replaces syscall(). Found before main: threads without the turn use it, too.
const auto original_syscall = verbatim::test::next_function<long (*)(long, ...)>("syscall");

// A lock, which may give the turn away, leaves errno as it is.
void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  const int error = errno;
  original_syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
  errno = error;
}

void await_turn(Thread& thread) {
  while (thread.turn.exchange(0, std::memory_order_acquire) == 0) futex(thread.turn, FUTEX_WAIT, 0);
}

std::size_t number_of(const Thread& thread) {
  return static_cast<std::size_t>(&thread - g_run->threads.data());
}

void give_turn(Thread& thread) {
  g_run->running = number_of(thread);
  thread.turn.store(1, std::memory_order_release);
  futex(thread.turn, FUTEX_WAKE, 1);
}

// SplitMix64.
std::uint64_t next_random() {
  std::uint64_t x = g_run->random_state += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

void add_to_hash(std::uint64_t value) {
  std::uint64_t& hash = g_run->outcome.hash;
  hash = (hash ^ value) * 0x9ddfea08eb382d69U;
  hash ^= hash >> 29;
}

void reset_pause() {
  g_run->pause = kFirstPause;
  g_run->progress_at = g_run->now;
}

bool is_long_in_vain() {
  return g_run->now - g_run->progress_at >= kLong;
}

bool is_alive(const Thread& thread) {
  return thread.state != State::kUnused && thread.state != State::kEnded;
}

template <typename Function>
void for_each_thread(Function function) {
  for (std::size_t i = 0; i < g_run->thread_count; ++i) function(g_run->threads[i]);
}

// The threads that could go on, but for those that have polled in vain often enough. `with_polling` false: without all
// that poll.
std::array<Thread*, kMaxThreads>& candidates(bool with_polling, std::size_t& count) {
  static std::array<Thread*, kMaxThreads> found;
  count = 0;
  for_each_thread([&](Thread& thread) {
    if (thread.state == State::kWaiting && thread.deadline <= g_run->now) {
      thread.state = State::kRunnable;
      thread.woken_by = Wake::kByDeadline;
    }
    const bool may_poll = with_polling && thread.state == State::kPolling &&
                          (thread.polled_activity != g_run->activity || thread.vain_polls < kVainPolls);
    if (thread.state == State::kRunnable || may_poll) found[count++] = &thread;
  });
  return found;
}

// Nobody can go on now. Null, or why nobody ever can.
const char* advance_time() {
  Time next = kNever;
  bool polling = false;
  for_each_thread([&](const Thread& thread) {
    if (thread.state == State::kWaiting) next = std::min(next, thread.deadline);
    polling = polling || thread.state == State::kPolling;
  });
  if (polling) {
    const Time begin = is_long_in_vain() ? g_run->polled_at : g_run->now;
    const bool others_are_first = next < begin + g_run->pause;
    if (!others_are_first) next = std::max(g_run->now, begin + g_run->pause);
    if (!others_are_first || !is_long_in_vain()) {
      const Time longest = std::clamp((g_run->now - g_run->progress_at) / 10, kLastPause, kLongestPause);
      g_run->pause = std::min(2 * g_run->pause, longest);
      g_run->polled_at = next;
      ++g_run->activity;
    }
  }
  if (next == kNever) return "deadlock: every thread waits, and none has a deadline";
  g_run->now = next;
  return next > g_run->plan.limit ? kBeyondLimit : nullptr;
}

// Null: nobody can go on, for the reason in `why`.
Thread* find_next(const char*& why) {
  // Those that poll are asked now and then while others run, too.
  const bool with_polling = next_random() % 16 == 0;
  for (why = nullptr; why == nullptr; why = advance_time()) {
    std::size_t count = 0;
    std::array<Thread*, kMaxThreads>* found = &candidates(with_polling, count);
    if (count == 0) found = &candidates(true, count);
    if (count == 0) continue;
    Thread* const chosen = (*found)[next_random() % count];
    chosen->state = State::kRunnable;
    return chosen;
  }
  return nullptr;
}

Thread& choose() {
  const char* why = nullptr;
  Thread* const chosen = find_next(why);
  if (chosen == nullptr) fail_run(why);
  return *chosen;
}

void print_failure(const char* why) {
  std::fprintf(stderr, "seed %llu at %.3f us: %s\n", static_cast<unsigned long long>(g_run->plan.seed),
               static_cast<double>(g_run->now) / 1e3, why);
  print_threads();
}

// Another thread may get the turn, and this one gets it back when it is chosen.
void pass_turn() {
  Thread& me = *self;
  Thread& next = choose();
  if (&next == &me) return;
  ++g_run->outcome.switches;
  give_turn(next);
  await_turn(me);
}

void set_call(const char* call) {
  std::snprintf(self->call, sizeof self->call, "%s", call);
}

// The kernel closes what the process has, and the program gives its turn to another one.
void die_if_planned() {
  if (g_process >= kMostProcessesThatDie || ++g_run->steps[g_process] != g_run->plan.dies_at[g_process]) return;
  record("death", static_cast<std::int64_t>(g_run->steps[g_process]));
  g_run->deaths[g_process] = g_run->now;
  ++g_run->activity;
  reset_pause();
  _exit(kExitOfDeath);
}

void pass_time(const char* call) {
  die_if_planned();
  set_call(call);
  g_run->now += kCallTime + next_random() % kCallTime;
  if (!self->polls && !is_long_in_vain()) ++g_run->activity;
}

}  // namespace

void prepare(const Plan& plan, std::size_t processes) {
  void* const memory = mmap(nullptr, sizeof(Run), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  if (g_run != nullptr) munmap(g_run, sizeof(Run));
  g_run = new (memory) Run;
  g_run->plan = plan;
  g_run->random_state = plan.seed ^ plan.order << 32;
  constexpr std::uint64_t kOneIn[] = {1, 2, 8, 32};
  g_run->switches_one_in = kOneIn[next_random() % std::size(kOneIn)];
  for (std::size_t i = 0; i < processes; ++i) g_run->threads[add_thread()].process = i;
}

void begin() {
  give_turn(choose());
}

Outcome outcome() {
  Outcome found = g_run->outcome;
  found.ended = g_run->now;
  return found;
}

bool pass_on_turn_of(std::size_t process) {
  if (g_run->threads[g_run->running].process != process) {
    print_failure("a process has ended without the turn");
    return false;
  }
  for_each_thread([&](Thread& thread) {
    if (thread.process == process) thread.state = State::kEnded;
  });
  const char* why = nullptr;
  Thread* const next = find_next(why);
  if (next == nullptr) print_failure(why);
  if (next != nullptr) give_turn(*next);
  return next != nullptr;
}

void enter_process(std::size_t process) {
  g_process = process;
  g_run->threads[process].handle = pthread_self();
  enter_thread(process);
}

std::size_t own_process() {
  return g_process;
}

Time death_of(std::size_t process) {
  const Time death = process < kMostProcessesThatDie ? g_run->deaths[process] : 0;
  return death == 0 ? kNever : death;
}

std::size_t threads_left() {
  std::size_t left = 0;
  for_each_thread([&](const Thread& thread) {
    const bool is_of_device = std::strcmp(thread.name, "softverbs-late") == 0;  // it ends with its process
    if (&thread != self && thread.process == g_process && is_alive(thread) && !is_of_device) ++left;
  });
  return left;
}

bool is_simulated() {
  return self != nullptr;
}

Time now() {
  return g_run->now;
}

std::uint64_t random_below(std::uint64_t bound) {
  return next_random() % bound;
}

void step(const char* call) {
  pass_time(call);
  if (g_run->now > g_run->plan.limit) fail_run(kBeyondLimit);
  if (self->keeps_turn == 0 && next_random() % g_run->switches_one_in == 0) pass_turn();
}

void record(const char* call, std::int64_t result) {
  ++g_run->outcome.events;
  add_to_hash(number_of(*self));
  for (const char* at = call; *at != '\0'; ++at) add_to_hash(static_cast<unsigned char>(*at));
  add_to_hash(g_run->now);
  add_to_hash(static_cast<std::uint64_t>(result));
  if (!g_run->plan.trace) return;
  const int error = errno;
  std::fprintf(stderr, "%12.3f us  %zu %2zu %-15s %s = %lld\n", static_cast<double>(g_run->now) / 1e3, g_process,
               number_of(*self), self->name, call, static_cast<long long>(result));
  errno = error;
}

Wake wait(const char* call, std::uintptr_t object, Time deadline) {
  set_call(call);
  self->object = object;
  self->deadline = deadline;
  self->state = State::kWaiting;
  self->woken_by = Wake::kByThread;
  pass_turn();
  self->object = 0;
  self->deadline = kNever;
  return self->woken_by;
}

std::size_t wake(std::uintptr_t object, std::size_t count) {
  std::array<Thread*, kMaxThreads> waiting;
  std::size_t left = 0;
  for_each_thread([&](Thread& thread) {
    const bool waits = thread.state == State::kWaiting && thread.object == object;
    if (waits && (thread.process == g_process || object <= kAnySharedFutex)) waiting[left++] = &thread;
  });
  std::size_t woken = 0;
  for (; woken < count && left > 0; ++woken) {
    const std::size_t chosen = left == 1 ? 0 : next_random() % left;
    waiting[chosen]->state = State::kRunnable;
    waiting[chosen] = waiting[--left];
  }
  return woken;
}

void poll_in_vain(const char* call) {
  pass_time(call);
  Thread& me = *self;
  if (me.polled_activity != g_run->activity) {
    me.polled_activity = g_run->activity;
    me.vain_polls = 0;
  }
  ++me.vain_polls;
  me.polls = true;
  me.state = State::kPolling;
  pass_turn();
}

void note_progress() {
  reset_pause();
  note_activity();
}

void note_activity() {
  if (!is_long_in_vain()) {
    ++g_run->activity;
    g_run->pause = kFirstPause;
  }
  if (self != nullptr) self->polls = false;
}

KeepTurn::KeepTurn() {
  if (self != nullptr) ++self->keeps_turn;
}

KeepTurn::~KeepTurn() {
  if (self != nullptr) --self->keeps_turn;
}

std::size_t add_thread() {
  std::size_t number = 0;
  while (number < g_run->thread_count && g_run->threads[number].state != State::kUnused) ++number;
  if (number == kMaxThreads) fail_run("too many threads");
  g_run->thread_count = std::max(g_run->thread_count, number + 1);
  Thread& thread = g_run->threads[number];
  std::destroy_at(&thread);
  std::construct_at(&thread);
  thread.state = State::kRunnable;
  thread.process = g_process;
  return number;
}

void remove_thread(std::size_t number) {
  g_run->threads[number].state = State::kUnused;
}

void enter_thread(std::size_t number) {
  self = &g_run->threads[number];
  await_turn(*self);
}

void end_thread() {
  Thread& me = *self;
  record("end of the thread", 0);
  me.state = State::kEnded;
  note_activity();
  wake(reinterpret_cast<std::uintptr_t>(&me));
  Thread& next = choose();
  self = nullptr;
  give_turn(next);
}

void set_handle(std::size_t number, pthread_t handle) {
  g_run->threads[number].handle = handle;
}

namespace {

// A detached one that has ended may have had the same handle.
Thread* thread_with(pthread_t handle) {
  Thread* ended = nullptr;
  for (std::size_t i = 0; i < g_run->thread_count; ++i) {
    Thread& thread = g_run->threads[i];
    if (thread.process != g_process || pthread_equal(thread.handle, handle) == 0) continue;
    if (is_alive(thread)) return &thread;
    if (thread.state == State::kEnded) ended = &thread;
  }
  return ended;
}

}  // namespace

void set_name(pthread_t handle, const char* name) {
  Thread* const thread = thread_with(handle);
  if (thread != nullptr) std::snprintf(thread->name, sizeof thread->name, "%s", name);
}

void wait_for_end(pthread_t handle) {
  Thread* const thread = thread_with(handle);
  if (thread == nullptr) fail_run("pthread_join of a thread that the simulation does not know");
  while (thread->state != State::kEnded) wait("pthread_join", reinterpret_cast<std::uintptr_t>(thread), kNever);
  thread->state = State::kUnused;  // another one may get its number
}

void print_threads() {
  char line[256];
  for_each_thread([&](const Thread& thread) {
    if (!is_alive(thread)) return;
    const char* const state = thread.state == State::kWaiting       ? "waits in"
                              : thread.state == State::kPolling     ? "polls with"
                              : number_of(thread) == g_run->running ? "runs in"
                                                                    : "may go on in";
    char until[48] = "";
    if (thread.state == State::kWaiting && thread.deadline != kNever)
      std::snprintf(until, sizeof until, " until %.3f us", static_cast<double>(thread.deadline) / 1e3);
    const int length =
        std::snprintf(line, sizeof line, "  process %zu, thread %zu%s%s %s %s%s\n", thread.process, number_of(thread),
                      thread.name[0] == '\0' ? "" : " ", thread.name, state, thread.call, until);
    static_cast<void>(!::write(STDERR_FILENO, line, static_cast<std::size_t>(length)));
  });
}

void fail_run(const char* why) {
  print_failure(why);
  _exit(1);
}

}  // namespace simulation
