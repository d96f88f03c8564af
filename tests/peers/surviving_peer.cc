#include "surviving_peer.h"

#include <sys/wait.h>

#include <regex>
#include <utility>

#include "lifecycle/process_resources.h"
#include "support/normalized_line.h"

namespace conformance {

using nccl::Result;

std::string normalize_line(const std::string& line) {
  std::string text = verbatim::normalized(line);
  for (const auto& [varying, word] :
       {std::pair{"^NET/Verbatim : ", ""},
        {"look at (HOST \\(pid #, 127\\.0\\.0\\.1:#\\)|127\\.0\\.0\\.1:#) first", "look at WHO first"},
        {"(recv: the peer closed the connection|(recv|send): (Broken pipe|Connection reset by peer))", "TCP-END"}}) {
    text = std::regex_replace(text, std::regex(varying), word);
  }
  return text;
}

bool read_listening(Process& peer, Listening& listening) {
  return peer.read(listening.handle.bytes, sizeof listening.handle.bytes) &&
         peer.read(&listening.port, sizeof listening.port);
}

bool has_changed_state(const Process& peer, int states) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(peer.pid()), &info, states | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

Exchange::Exchange(netapi::Plugin& net, void* comm, bool sends) : net_(net), comm_(comm), sends_(sends) {
  sends ? memory_.write(0, kBytes, kSeed) : memory_.expect(0, kBytes, kSeed);
  EXPECT_OK(net.reg_mr(comm, memory_.data(), memory_.size(), nccl::kPtrHost, &mhandle_));
}

Exchange::~Exchange() {
  EXPECT_OK(net_.dereg_mr(comm_, mhandle_));
  EXPECT_OK(sends_ ? net_.close_send(comm_) : net_.close_recv(comm_));
}

bool Exchange::step() {
  if (is_over_) return true;
  void* data = memory_.data();
  std::size_t size = kBytes;
  int tag = kTag;
  int done = 0;
  int moved = 0;
  if (request_ != nullptr) {
    result_ = net_.test(request_, &done, &moved);
  } else if (sends_) {
    result_ = net_.isend(comm_, data, size, tag, mhandle_, &request_);
  } else {
    result_ = net_.irecv(comm_, 1, &data, &size, &tag, &mhandle_, &request_);
  }
  if (done != 0) {
    EXPECT_EQ(moved, static_cast<int>(kBytes));
    EXPECT_TRUE(memory_.intact());
  }
  return is_over_ = done != 0 || result_ != Result::kSuccess;
}

SurvivingPeer::Attempt SurvivingPeer::accept(void* listen_comm) {
  Attempt attempt;
  attempt.result = net().accept(listen_comm, &attempt.comm);
  return attempt;
}

SurvivingPeer::Attempt SurvivingPeer::connect(void* context, Handle& handle) {
  Attempt attempt;
  attempt.result = net().connect(context, 0, handle.bytes, &attempt.comm);
  return attempt;
}

Result SurvivingPeer::exchange(void* comm, bool sends) {
  Exchange exchange(net(), comm, sends);
  EXPECT_TRUE(eventually([&] { return exchange.step(); })) << "the exchange neither completed nor failed";
  return exchange.result();
}

void* SurvivingPeer::listen(void* context, Handle& handle) {
  void* listen_comm = nullptr;
  EXPECT_OK(net().listen(context, 0, handle.bytes, &listen_comm));
  return listen_comm;
}

void SurvivingPeer::run_role_once(const std::function<void(void* context)>& body) {
  const ProcessResources before = ProcessResources::take();
  void* const context = new_context();
  if (HasFailure()) return;
  body(context);
  finalize(context);
  EXPECT_EQ(verbs_alive(), "");
  EXPECT_TRUE(is_restored(before, std::size_t{1} << 30));
}

}  // namespace conformance
