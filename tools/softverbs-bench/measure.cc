#include "softverbs-bench/measure.h"

#include <sched.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace verbatim::bench {
namespace {

// A waiting thread yields its core after this many polls: the machine may have fewer cores than polling threads.
constexpr unsigned kPollsBeforeYield = 200;
constexpr std::uint64_t kTimeoutNs = 10 * kNanosecondsPerSecond;

// Polls until done() returns true. False: timeout.
template <typename Done>
bool wait_until(Done done) {
  const std::uint64_t deadline = monotonic_ns() + kTimeoutNs;
  for (unsigned polls = 1; !done(); ++polls) {
    if (polls % kPollsBeforeYield != 0) continue;
    if (monotonic_ns() > deadline) return false;
    sched_yield();
  }
  return true;
}

Error timeout_error(const char* what) {
  return {ErrorKind::kRemote, ETIMEDOUT, what};
}

}  // namespace

Status Bandwidth::write_window(std::size_t piece) {
  std::vector<unsigned> outstanding(endpoints_.size());
  std::size_t offset = 0;
  Status failure;
  const bool finished = wait_until([&] {
    unsigned all = 0;
    for (std::size_t i = 0; i < endpoints_.size(); ++i) {
      if (offset < Area::kWindowBytes && outstanding[i] < Endpoint::kDepth) {
        failure =
            endpoints_[i].write(offsetof(Area, source) + offset, offsetof(Area, target) + offset, piece, true, false);
        if (!failure) return true;
        offset += piece;
        ++outstanding[i];
      }
      const auto found = endpoints_[i].poll();
      if (!found) {
        failure = found.error();
        return true;
      }
      outstanding[i] -= *found;
      all += outstanding[i];
    }
    return all == 0 && offset == Area::kWindowBytes;
  });
  if (!finished) return timeout_error("RDMA WRITE");
  return failure;
}

Result<double> message_rate(std::vector<Endpoint>& endpoints, std::uint64_t count) {
  constexpr std::uint64_t kSignalEvery = Endpoint::kDepth / 4;
  std::vector<unsigned> outstanding(endpoints.size());
  std::uint64_t posted = 0;  // of each endpoint
  Status failure;
  const auto drain = [&](std::size_t i, unsigned most) {
    return wait_until([&] {
      const auto found = endpoints[i].poll();
      if (!found) {
        failure = found.error();
        return true;
      }
      outstanding[i] -= *found * static_cast<unsigned>(kSignalEvery);
      return outstanding[i] <= most;
    });
  };
  const std::uint64_t start = monotonic_ns();
  while (posted < count) {
    for (std::size_t i = 0; i < endpoints.size(); ++i) {
      for (std::uint64_t n = 1; n <= kSignalEvery && failure; ++n) {
        failure = endpoints[i].write(offsetof(Area, outgoing), offsetof(Area, target), 8, n == kSignalEvery, true);
      }
      outstanding[i] += kSignalEvery;
      if (!failure) return failure.error();
      if (!drain(i, Endpoint::kDepth - kSignalEvery)) return timeout_error("8-byte RDMA WRITE");
    }
    posted += kSignalEvery;
  }
  for (std::size_t i = 0; i < endpoints.size(); ++i) {
    if (!drain(i, 0)) return timeout_error("8-byte RDMA WRITE");
  }
  if (!failure) return failure.error();
  const double seconds = static_cast<double>(monotonic_ns() - start) / static_cast<double>(kNanosecondsPerSecond);
  return static_cast<double>(posted) * static_cast<double>(endpoints.size()) / seconds;
}

Status Bandwidth::process_vm_window(std::size_t piece) {
  for (std::size_t offset = 0; offset < Area::kWindowBytes; offset += piece) {
    const iovec from{area_.source + offset, piece};
    const iovec to{area_.target + offset, piece};  // both processes have the area at the same address
    const ssize_t moved = process_vm_writev(peer_, &from, 1, &to, 1, 0);
    if (moved != static_cast<ssize_t>(piece)) return system_error("process_vm_writev", errno);
  }
  return {};
}

Status Bandwidth::pass(CopyMethod method, std::size_t piece) {
  switch (method) {
    case CopyMethod::kProcessVm:
      return process_vm_window(piece);
    case CopyMethod::kVerbs:
      return write_window(piece);
    case CopyMethod::kMemcpy:
      for (std::size_t offset = 0; offset < Area::kWindowBytes; offset += piece) {
        std::memcpy(area_.target + offset, area_.source + offset, piece);
      }
      break;
  }
  return {};
}

Result<double> Bandwidth::measure(CopyMethod method, std::size_t piece, unsigned passes) {
  sched_yield();  // begin with a full time slice
  const std::uint64_t start = monotonic_ns();
  for (unsigned i = 0; i < passes; ++i) {
    if (Status status = pass(method, piece); !status) return status.error();
  }
  const double seconds = static_cast<double>(monotonic_ns() - start) / static_cast<double>(kNanosecondsPerSecond);
  return static_cast<double>(Area::kWindowBytes) * passes / seconds;
}

Result<bool> Bandwidth::is_copy_correct(CopyMethod method, std::size_t piece) {
  std::uint64_t state = monotonic_ns() | 1;
  for (std::size_t offset = 0; offset < Area::kWindowBytes; offset += sizeof(state)) {
    state = state * 6364136223846793005 + 1442695040888963407;  // different words at every offset and in every run
    std::memcpy(area_.source + offset, &state, sizeof(state));
  }
  std::memset(area_.target, 0xA5, Area::kWindowBytes);
  if (Status status = pass(method, piece); !status) return status.error();
  return std::memcmp(area_.source, area_.target, Area::kWindowBytes) == 0;
}

Result<double> verbs_ping_pong(Area& area, Endpoint& endpoint, Side side, std::uint64_t rounds) {
  const bool starts = side == Side::kPing;
  std::atomic<std::uint64_t>& incoming = starts ? area.pong : area.ping;
  std::atomic<std::uint64_t>& outgoing = area.outgoing[starts ? 0 : 1];
  const std::size_t from = offsetof(Area, outgoing) + (starts ? 0 : sizeof(outgoing));
  const std::size_t to = starts ? offsetof(Area, ping) : offsetof(Area, pong);
  constexpr std::uint64_t kSignalEvery = Endpoint::kDepth / 2;
  Status failure;
  const auto write_round = [&](std::uint64_t round) {
    outgoing.store(round, std::memory_order_relaxed);
    const bool signalled = round % kSignalEvery == 0 || round == rounds;
    failure = endpoint.write(from, to, sizeof(round), signalled, true);
    if (!failure || !signalled) return;
    const bool finished = wait_until([&] {
      const auto found = endpoint.poll();
      if (!found) failure = found.error();
      return !found || *found == 1;
    });
    if (!finished) failure = timeout_error("8-byte RDMA WRITE");
  };
  const std::uint64_t start = monotonic_ns();
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    if (starts) write_round(round);
    if (failure && !wait_until([&] { return incoming.load(std::memory_order_acquire) == round; })) {
      failure = timeout_error("8-byte RDMA WRITE");
    }
    if (failure && !starts) write_round(round);
    if (!failure) return failure.error();
  }
  return static_cast<double>(monotonic_ns() - start) / static_cast<double>(2 * rounds);
}

double memory_ping_pong(Area& area, Side side, std::uint64_t rounds) {
  const bool starts = side == Side::kPing;
  std::atomic<std::uint64_t>& incoming = starts ? area.pong : area.ping;
  std::atomic<std::uint64_t>& outgoing = starts ? area.ping : area.pong;
  const std::uint64_t start = monotonic_ns();
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    if (starts) outgoing.store(round, std::memory_order_release);
    if (!wait_until([&] { return incoming.load(std::memory_order_acquire) == round; })) break;
    if (!starts) outgoing.store(round, std::memory_order_release);
  }
  return static_cast<double>(monotonic_ns() - start) / static_cast<double>(2 * rounds);
}

}  // namespace verbatim::bench
