#include "ranks/coordinator_connection.h"

#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/clock.h"
#include "base/socket.h"
#include "ranks/meeting_point.h"
#include "ranks/plugin_log.h"

namespace verbatim::ranks {
namespace {

constexpr int kRetryMs = 100;
constexpr std::chrono::seconds kAbortTimeout{3};
// At the end of the time the coordinator reports which ranks are missing, so a rank waits a little longer.
constexpr std::uint64_t kGraceNs = kNanosecondsPerSecond;

std::uint64_t deadline_after(int seconds) {
  return monotonic_ns() + static_cast<std::uint64_t>(seconds) * kNanosecondsPerSecond;
}

// How long poll() may wait until `deadline_ns`, in milliseconds.
int ms_until(std::uint64_t deadline_ns) {
  constexpr std::uint64_t kShortestMs = 10;
  constexpr std::uint64_t kLongestMs = 60'000;
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t left_ns = now < deadline_ns ? deadline_ns - now : 0;
  return static_cast<int>(std::clamp(left_ns / kNanosecondsPerMillisecond, kShortestMs, kLongestMs));
}

}  // namespace

CoordinatorConnection::CoordinatorConnection(const std::string& root, const Hello& hello, int timeout_s,
                                             Reports reports)
    : root_(root),
      name_("rank " + std::to_string(hello.rank)),
      timeout_s_(timeout_s),
      deadline_ns_(deadline_after(timeout_s == kNoTimeoutS ? kDefaultTimeoutS : timeout_s)),
      reports_(reports) {
  while (!join(hello)) ::poll(nullptr, 0, kRetryMs);
  if (timeout_s == kNoTimeoutS) deadline_ns_ = deadline_after(timeout_s);
  listener_ = std::thread([this] { listen(); });
}

// Returns false when it must be tried again: rank 0 of an earlier job of the same launcher may still listen.
bool CoordinatorConnection::join(const Hello& hello) {
  socket_ = connect_to(root_, deadline_ns_);
  reader_ = FrameReader();
  if (!send_frame(socket_.get(), FrameKind::kHello, to_bytes(hello))) return false;
  for (;;) {
    pollfd readable{socket_.get(), POLLIN, 0};
    ::poll(&readable, 1, ms_until(deadline_ns_ + kGraceNs));
    const FrameReader::State state = reader_.read(socket_.get());
    if (const auto frame = reader_.next()) {
      if (frame->kind == FrameKind::kWelcome) {
        welcome_ = from_bytes<Welcome>(frame->payload);
        return true;
      }
      if (frame->kind == FrameKind::kRefused || frame->kind == FrameKind::kAbort) {
        const Reason reason = reason_in(frame->payload);
        const std::string what = frame->kind == FrameKind::kAbort ? "stopped: " : "rank 0 rejects this rank: ";
        throw Failure(what + reason.text, reason.status);
      }
    }
    const bool is_open = state == FrameReader::State::kOpen;
    if (monotonic_ns() > deadline_ns_ + (is_open ? kGraceNs : 0)) {
      throw Failure(root_ + (is_open ? " accepts connections, but sends no answer" : " closes connections") +
                        ". Next: check that rank 0 of this job listens there, and not another program (--root)",
                    ExitStatus::kTimeout);
    }
    if (!is_open) return false;
  }
}

CoordinatorConnection::~CoordinatorConnection() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  ::shutdown(socket_.get(), SHUT_RDWR);
  listener_.join();
}

std::vector<std::string> CoordinatorConnection::all_gather(const std::string& part) {
  send_frame(socket_.get(), FrameKind::kGather, part);  // a failure ends the process in listen()
  gathering_ = true;
  std::unique_lock lock(mutex_);
  part_arrived_.wait(lock, [this] { return gathered_.has_value(); });
  gathering_ = false;
  const std::string packed = std::move(*gathered_);
  gathered_.reset();
  return unpack(packed);
}

sockaddr_storage CoordinatorConnection::own_address() const {
  auto address = local_address(socket_);
  if (!address) throw Failure("cannot get the address of the connection to the coordinator");
  if (address->ss_family == AF_UNIX) {
    *address = {};
    auto& inet = reinterpret_cast<sockaddr_in&>(*address);
    inet.sin_family = AF_INET;
    inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  set_port(*address, 0);
  return *address;
}

void CoordinatorConnection::finish() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  send_frame(socket_.get(), FrameKind::kFinished, {});
}

void CoordinatorConnection::fail(ExitStatus status, const std::string& why) {
  failing_ = true;
  report(why);
  if (send_frame(socket_.get(), FrameKind::kFail, to_payload({status, why}))) {
    std::this_thread::sleep_for(kAbortTimeout);
  }
  _exit(static_cast<int>(status));  // normally listen() has received the abort and ended the process before
}

void CoordinatorConnection::listen() {
  while (const auto frame = reader_.next()) handle(*frame);  // received behind the welcome
  for (;;) {
    pollfd readable{socket_.get(), POLLIN, 0};
    ::poll(&readable, 1, ms_until(deadline_ns_ + kGraceNs));
    const FrameReader::State state = reader_.read(socket_.get());
    while (const auto frame = reader_.next()) handle(*frame);
    std::unique_lock lock(mutex_);
    if (state != FrameReader::State::kOpen && leaving_) return;
    if (state != FrameReader::State::kOpen) {
      print_error(name_ + ": the coordinator of the ranks closed the connection");
      _exit(static_cast<int>(ExitStatus::kFailed));
    }
    if (leaving_ || failing_ || monotonic_ns() < deadline_ns_ + kGraceNs) continue;
    lock.unlock();
    time_out();
  }
}

void CoordinatorConnection::handle(const Frame& frame) {
  if (frame.kind == FrameKind::kGathered) {
    std::lock_guard lock(mutex_);
    gathered_ = frame.payload;
    part_arrived_.notify_one();
  } else if (frame.kind == FrameKind::kAbort) {
    const Reason reason = reason_in(frame.payload);
    if (!failing_) report("stopped: " + reason.text);
    _exit(static_cast<int>(reason.status));
  }
}

void CoordinatorConnection::time_out() {
  const std::string why = "not finished after " + std::to_string(timeout_s_) + " s (--timeout)" +
                          (gathering_ ? ": it waits for other ranks" : "") + plugin_warnings();
  report(why);
  send_frame(socket_.get(), FrameKind::kFail, to_payload({ExitStatus::kTimeout, why}));
  _exit(static_cast<int>(ExitStatus::kTimeout));
}

void CoordinatorConnection::report(const std::string& why) const {
  if (reports_ == Reports::kItself) print_error(name_ + ": " + why);
}

}  // namespace verbatim::ranks
