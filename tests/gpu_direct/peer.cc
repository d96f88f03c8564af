#include "peer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>

#include "gpu_test.h"
#include "netapi/log.h"

namespace gpu_direct {

bool PeerProcess::exchange_handles(conformance::Handle& own, conformance::Handle& others) {
  const bool exchanged =
      process_.write(own.bytes, sizeof own.bytes) && process_.read(others.bytes, sizeof others.bytes);
  EXPECT_TRUE(exchanged) << "no handle from the other process";
  return exchanged;
}

void PeerProcess::ask(const Command& command) {
  EXPECT_TRUE(process_.write(&command, sizeof command));
}

Answer PeerProcess::answer() {
  Answer answer;
  EXPECT_TRUE(process_.read(&answer, sizeof answer)) << "no answer from the other process";
  return answer;
}

namespace {

bool read_all(void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = read(STDIN_FILENO, at, bytes);
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_all(const void* data, std::size_t bytes) {
  return write(STDOUT_FILENO, data, bytes) == static_cast<ssize_t>(bytes);
}

struct Lines {
  std::mutex mutex;
  std::string text;
};

class PeerRole {
 public:
  PeerRole(netapi::Plugin& net, void* context, Lines& warnings) : net_(net), context_(context), warnings_(warnings) {}

  // Until the test ends.
  bool run() {
    if (!connect()) return false;
    for (Command command{}; read_all(&command, sizeof command);) {
      const Answer answer = execute(command);
      if (!write_all(&answer, sizeof answer)) return false;
    }
    deregister();
    EXPECT_OK(net_.close_send(send_comm_));
    EXPECT_OK(net_.close_recv(recv_comm_));
    return true;
  }

 private:
  bool connect() {
    conformance::Handle own;
    conformance::Handle others;
    void* listen_comm = nullptr;
    EXPECT_OK(net_.listen(context_, 0, own.bytes, &listen_comm));
    if (!write_all(own.bytes, sizeof own.bytes) || !read_all(others.bytes, sizeof others.bytes)) return false;
    nccl::Result result = nccl::Result::kSuccess;
    eventually([&] {
      if (send_comm_ == nullptr) result = net_.connect(context_, 0, others.bytes, &send_comm_);
      if (recv_comm_ == nullptr && result == nccl::Result::kSuccess) result = net_.accept(listen_comm, &recv_comm_);
      return result != nccl::Result::kSuccess || (send_comm_ != nullptr && recv_comm_ != nullptr);
    });
    EXPECT_OK(net_.close_listen(listen_comm));
    const Answer answer{.result = recv_comm_ != nullptr ? result : nccl::Result::kInternalError};
    return write_all(&answer, sizeof answer) && answer.result == nccl::Result::kSuccess;
  }

  void deregister() {
    // Without an effect for null.
    EXPECT_OK(net_.dereg_mr(send_comm_, std::exchange(send_mr_, nullptr)));
    EXPECT_OK(net_.dereg_mr(recv_comm_, std::exchange(recv_mr_, nullptr)));
  }

  Answer execute(const Command& command) {
    Answer answer;
    switch (command.verb) {
      case Command::Verb::kAllocate: {
        deregister();
        buffer_ = std::make_unique<Buffer>(command.place, command.size, command.at);
        answer.start = buffer_->start();
        const auto register_on = [&](void* comm, void** mhandle) {
          return register_memory(net_, comm, buffer_->data(), buffer_->size(), command.place, mhandle, {},
                                 buffer_->start());
        };
        answer.result = register_on(send_comm_, &send_mr_);
        if (answer.result == nccl::Result::kSuccess) answer.result = register_on(recv_comm_, &recv_mr_);
        break;
      }
      case Command::Verb::kFree:
        deregister();
        buffer_.reset();
        break;
      case Command::Verb::kSend:
        buffer_->write(command.at, command.size, command.seed);
        fail_copy();
        answer.result =
            post_and_wait(net_, send_comm_, true, {buffer_->data() + command.at, command.size, 0, send_mr_}, nullptr);
        if (answer.result == nccl::Result::kSuccess) answer.intact = static_cast<bool>(buffer_->intact());
        break;
      case Command::Verb::kReceive: {
        const Part part{buffer_->data() + command.at, command.size, 0, recv_mr_};
        buffer_->expect(command.at, command.size, command.seed);
        fail_copy();
        answer.result = post_and_wait(net_, recv_comm_, false, part, nullptr);
        if (answer.result == nccl::Result::kSuccess) answer.result = flush_and_wait(net_, recv_comm_, part);
        if (answer.result == nccl::Result::kSuccess) {
          const auto intact = buffer_->intact();
          answer.intact = static_cast<bool>(intact);
          if (!intact) std::strncpy(answer.text, intact.message(), sizeof answer.text - 1);
        }
        break;
      }
      case Command::Verb::kFailCopy:
        failing_copy_ = static_cast<unsigned>(command.at);
        break;
      case Command::Verb::kBeginKernel:
        kernels_ = std::make_unique<SpinningKernels>();
        break;
      case Command::Verb::kEndKernel:
        answer.waits = kernels_->waits();
        kernels_.reset();
        break;
      case Command::Verb::kReadWarnings: {
        const std::lock_guard lock(warnings_.mutex);
        std::strncpy(answer.text, warnings_.text.c_str(), sizeof answer.text - 1);
        warnings_.text.clear();
        break;
      }
    }
    return answer;
  }

  // Not before: the copies of `write` are the buffer's own.
  void fail_copy() {
    if (failing_copy_ != 0) cuda().standin_cuda_fail_copy(std::exchange(failing_copy_, 0), CUDA_ERROR_LAUNCH_FAILED);
  }

  netapi::Plugin& net_;
  void* const context_;
  Lines& warnings_;
  void* send_comm_ = nullptr;
  void* recv_comm_ = nullptr;
  std::unique_ptr<Buffer> buffer_;
  void* send_mr_ = nullptr;
  void* recv_mr_ = nullptr;
  unsigned failing_copy_ = 0;
  std::unique_ptr<SpinningKernels> kernels_;
};

// Role "describe": a line with ptrSupport of the first device, one with name, PCI path and forceFlush of each, one with
// forceFlush of the first two as one device, and the lines of the log about devices.
int describe(netapi::Plugin& net, const Lines& lines) {
  netapi::Properties properties;
  EXPECT_OK(net.properties(0, &properties));
  std::cout << "ptrSupport " << properties.ptr_support << "\n";
  int count = 0;
  EXPECT_OK(net.devices(&count));
  for (int device = 0; device < count; ++device) {
    EXPECT_OK(net.properties(device, &properties));
    std::cout << "device " << properties.name << " " << properties.pci_path << " " << properties.force_flush << "\n";
  }
  int merged = 0;
  if (count > 1 && net.has_make_vdevice() && net.make_vdevice({0, 1}, &merged) == nccl::Result::kSuccess) {
    EXPECT_OK(net.properties(merged, &properties));
    std::cout << "merged " << properties.force_flush << "\n";
  }
  std::cout << lines.text << std::flush;
  return 0;
}

}  // namespace
}  // namespace gpu_direct

namespace conformance {

int run_role(const std::string& role, int api) {
  using gpu_direct::Lines;
  Lines lines;
  const bool describes = role == "describe";
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    if (!describes && line.level != nccl::DebugLogLevel::kWarn) return;
    const std::lock_guard lock(lines.mutex);
    lines.text += line.text + "\n";
  });
  // Before the plugin looks for devices, as in a program with CUDA.
  gpu_direct::cuda();
  netapi::Opened opened = netapi::open_plugin(options().plugin, api);
  if (opened.plugin == nullptr) {
    std::cerr << opened.error << "\n";
    return 2;
  }
  void* context = nullptr;
  EXPECT_OK(opened.plugin->init(1, {}, &context));
  const bool ended = describes ? gpu_direct::describe(*opened.plugin, lines) == 0
                               : gpu_direct::PeerRole(*opened.plugin, context, lines).run();
  EXPECT_OK(opened.plugin->finalize(context));
  opened.plugin.reset();
  netapi::set_log_callback({});
  return ended ? 0 : 1;
}

}  // namespace conformance
