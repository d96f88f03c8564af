#include "traffic.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "netapi/log.h"

namespace verbatim::completion {
namespace {

constexpr auto kMoveTimeout = std::chrono::seconds(60);
constexpr std::size_t kMembers = 8;
constexpr std::size_t kGuardBytes = 64;  // after each receive buffer; must not change
constexpr std::size_t kSkewBytes = 64;   // buffers start at any offset in a cache line
constexpr std::size_t kStride = (kMaxBytes + kGuardBytes + kSkewBytes + 4095) / 4096 * 4096;
constexpr std::byte kUntouched{0xa5};
constexpr std::uint64_t kMaxReports = 10;

}  // namespace

void require(nccl::Result result, const char* call) {
  if (result == nccl::Result::kSuccess) return;
  throw Failure(std::string(call) + ": " + netapi::result_name(result));
}

Traffic::Traffic(netapi::Plugin& plugin, void* send_comm, void* recv_comm, const PlanOptions& options, Totals& totals)
    : plugin_(plugin),
      send_comm_(send_comm),
      recv_comm_(recv_comm),
      plan_(options),
      totals_(totals),
      source_(kWindow * kMembers * kStride),
      target_(source_.size()) {
  require(plugin_.reg_mr(send_comm_, source_.data(), source_.size(), nccl::kPtrHost, &source_handle_), "regMr");
  require(plugin_.reg_mr(recv_comm_, target_.data(), target_.size(), nccl::kPtrHost, &target_handle_), "regMr");
}

Traffic::~Traffic() {
  plugin_.dereg_mr(send_comm_, source_handle_);
  plugin_.dereg_mr(recv_comm_, target_handle_);
}

void Traffic::run() {
  auto last_move = std::chrono::steady_clock::now();
  while (true) {
    while (begun_ - oldest_ < kWindow && !plan_.is_over()) begin();
    if (oldest_ == begun_) return;
    moved_ = false;
    // Random numbers of posts and sends, so that sometimes the receiver is ahead and sometimes the sender.
    for (std::uint64_t tries = plan_.draw(4); tries > 0 && post(); --tries) {
    }
    for (std::uint64_t tries = plan_.draw(2 * kMembers); tries > 0 && send(); --tries) {
    }
    const std::uint64_t in_flight = begun_ - oldest_;
    const std::uint64_t first = plan_.draw(in_flight);
    for (std::uint64_t i = 0; i < in_flight; ++i) test(flight(oldest_ + (first + i) % in_flight));
    for (; oldest_ < begun_ && flight(oldest_).verified && oldest_ < sent_ && flight(oldest_).sends_open == 0;
         ++oldest_)
      moved_ = true;
    if (moved_) {
      last_move = std::chrono::steady_clock::now();
    } else {
      if (std::chrono::steady_clock::now() - last_move > kMoveTimeout) {
        throw Failure("no progress: " + std::to_string(oldest_) + " groups done, " + std::to_string(posted_) +
                      " posted, " + std::to_string(sent_) + " sent");
      }
      sched_yield();
    }
  }
}

void Traffic::begin() {
  const std::size_t slot = begun_ % kWindow;
  GroupInFlight& at = flight(begun_++);
  at = {};
  at.group = plan_.next();
  for (std::size_t i = 0; i < at.group.members.size(); ++i) {
    const Member& member = at.group.members[i];
    const std::size_t offset = (slot * kMembers + i) * kStride;
    at.sources.push_back(&source_[offset + plan_.draw(kSkewBytes)]);
    at.targets.push_back(&target_[offset + plan_.draw(kSkewBytes)]);
    write_content(at.sources[i], member.bytes, member.number);
    std::fill_n(at.targets[i], member.capacity + kGuardBytes, kUntouched);
  }
  at.sends_open = at.group.members.size();
}

bool Traffic::post() {
  if (posted_ == begun_) return false;
  GroupInFlight& at = flight(posted_);
  const std::vector<Member>& members = at.group.members;
  std::array<void*, kMembers> data{};
  std::array<std::size_t, kMembers> sizes{};
  std::array<int, kMembers> tags{};
  std::array<void*, kMembers> handles{};
  for (std::size_t i = 0; i < members.size(); ++i) {
    data[i] = at.targets[i];
    sizes[i] = members[i].capacity;
    tags[i] = members[i].tag;
    handles[i] = target_handle_;
  }
  void* request = at.group.optional ? reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion) : nullptr;
  require(plugin_.irecv(recv_comm_, static_cast<int>(members.size()), data.data(), sizes.data(), tags.data(),
                        handles.data(), &request),
          "irecv");
  if (request == nullptr) return false;
  at.receive = request;
  at.posted = true;
  ++posted_;
  ++totals_.groups[members.size() - 1];
  if (at.group.optional) ++totals_.optional;
  moved_ = true;
  return true;
}

bool Traffic::send() {
  if (sent_ == begun_) return false;
  GroupInFlight& at = flight(sent_);
  const std::size_t i = at.group.send_order[at.sends.size()];
  const Member& member = at.group.members[i];
  void* request = nullptr;
  require(plugin_.isend(send_comm_, at.sources[i], member.bytes, member.tag, source_handle_, &request), "isend");
  if (request == nullptr) return false;
  at.sends.push_back(request);
  ++totals_.messages;
  totals_.bytes += member.bytes;
  if (!at.group.optional) totals_.received_bytes += member.bytes;
  if (at.sends.size() == at.group.members.size()) ++sent_;
  moved_ = true;
  return true;
}

void Traffic::test(GroupInFlight& at) {
  if (at.posted && !at.received) test_receive(at);
  test_sends(at);
  if (at.received && !at.verified) verify_group(at);
}

void Traffic::test_receive(GroupInFlight& at) {
  int done = 0;
  std::array<int, kMembers> sizes{};
  require(plugin_.test(at.receive, &done, sizes.data()), "test of a receive");
  if (done == 0) {
    if (at.group.optional) throw Failure("a receive with optional completion is not done at once");
    return;
  }
  at.received = true;
  moved_ = true;
  for (std::size_t i = 0; i < at.group.members.size(); ++i) {
    const Member& member = at.group.members[i];
    if (static_cast<std::size_t>(sizes[i]) == member.bytes) continue;
    if (totals_.wrong_sizes++ >= kMaxReports) continue;
    std::printf("message %llu has %zu bytes, but test reports %d\n", static_cast<unsigned long long>(member.number),
                member.bytes, sizes[i]);
  }
}

void Traffic::test_sends(GroupInFlight& at) {
  for (std::size_t i = 0; i < at.sends.size(); ++i) {
    if (at.sends[i] == nullptr) continue;
    int done = 0;
    int size = -1;
    require(plugin_.test(at.sends[i], &done, &size), "test of a send");
    if (done == 0) continue;
    const Member& member = at.group.members[at.group.send_order[i]];
    if (static_cast<std::size_t>(size) != member.bytes) ++totals_.wrong_sizes;
    at.sends[i] = nullptr;
    --at.sends_open;
    moved_ = true;
  }
}

// Checks the data of a receive that is done. With optional completion, the data can arrive later than that.
void Traffic::verify_group(GroupInFlight& at) {
  if (at.group.optional && !is_intact(at, 0)) {
    const bool was_sent = at.sends.size() == 1 && at.sends_open == 0;
    if (!was_sent) return;  // when the send is done, the data must have arrived
  }
  at.verified = true;
  for (std::size_t i = 0; i < at.group.members.size(); ++i) {
    if (is_intact(at, i) || totals_.wrong_bytes++ >= kMaxReports) continue;
    const Member& member = at.group.members[i];
    std::printf("message %llu of %zu bytes, member %zu of %zu, has wrong bytes\n",
                static_cast<unsigned long long>(member.number), member.bytes, i, at.group.members.size());
  }
}

bool Traffic::is_intact(const GroupInFlight& at, std::size_t i) const {
  const Member& member = at.group.members[i];
  const std::byte* const target = at.targets[i];
  const auto untouched = [](std::byte value) { return value == kUntouched; };
  return has_content(target, member.bytes, member.number) &&
         std::all_of(target + member.bytes, target + member.capacity + kGuardBytes, untouched);
}

}  // namespace verbatim::completion
