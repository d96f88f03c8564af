#include "plugin_lifetime.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include "base/unique_fd.h"
#include "conformance.h"
#include "dma_buf.h"
#include "netapi/log.h"
#include "netapi/plugin.h"

namespace fault {
namespace {

using conformance::Clock;
using nccl::Result;

constexpr std::size_t kBufferBytes = 128 << 10;
constexpr auto kTimeout = std::chrono::seconds(10);

bool eventually(const std::function<bool()>& poll) {
  return conformance::eventually(poll, kTimeout);
}

struct Message {
  std::size_t offset;  // in both buffers
  std::size_t bytes;
  std::size_t capacity;
};

unsigned char content(std::size_t at) {
  return static_cast<unsigned char>(at * 7 + at / 251 + 1);
}

class PluginLifetime {
 public:
  PluginLifetime(netapi::Plugin& net, LifetimeResult& outcome) : net_(net), outcome_(outcome), source_(kBufferBytes) {
    for (std::size_t i = 0; i < source_.size(); ++i) source_[i] = content(i);
  }

  void run() {
    if (!succeeded("init", net_.init(0x1234, {}, &context_))) return;
    if (query_properties() && connect() && register_all()) exchange_all();
    read_state();
    close_all();
    succeeded("finalize", net_.finalize(context_));
  }

 private:
  enum Side : std::size_t { kSender, kReceiver };

  bool succeeded(const char* call, Result result) {
    if (result != Result::kSuccess && outcome_.failed.empty()) {
      outcome_.failed = std::string(call) + ": " + netapi::result_name(result);
    }
    return result == Result::kSuccess;
  }
  void add_violation(std::string what) {
    if (outcome_.violation.empty()) outcome_.violation = std::move(what);
  }

  bool query_properties() {
    int count = 0;
    netapi::Properties properties;
    if (!succeeded("devices", net_.devices(&count)) || !succeeded("getProperties", net_.properties(0, &properties)))
      return false;
    group_ = properties.max_recvs > 1;
    return true;
  }

  bool connect() {
    conformance::Handle handle;
    void* listen_comm = nullptr;
    if (!succeeded("listen", net_.listen(context_, 0, handle.bytes, &listen_comm))) return false;
    bool connects = true;
    bool accepts = true;
    const auto close_listen = [&] {
      if (void* const closing = std::exchange(listen_comm, nullptr); closing != nullptr) {
        succeeded("closeListen", net_.close_listen(closing));
      }
    };
    const bool settled = eventually([&] {
      if (connects && comm_[kSender] == nullptr) {
        connects = succeeded("connect", net_.connect(context_, 0, handle.bytes, &comm_[kSender]));
      }
      if (accepts && connects && comm_[kReceiver] == nullptr) {
        accepts = succeeded("accept", net_.accept(listen_comm, &comm_[kReceiver]));
        if (!accepts) close_listen();
      }
      // When connect has failed, the listening end need not report it. When accept has failed, connect must end too.
      return !connects || (comm_[kSender] != nullptr && (!accepts || comm_[kReceiver] != nullptr));
    });
    if (!settled) add_violation("connect or accept did not end");
    close_listen();
    return comm_[kSender] != nullptr && comm_[kReceiver] != nullptr;
  }

  void* register_memory(const char* call, Side side, void* data, int type) {
    void* mhandle = nullptr;
    if (!succeeded(call, net_.reg_mr(comm_[side], data, kBufferBytes, type, &mhandle))) return nullptr;
    registrations_.emplace_back(comm_[side], mhandle);
    return mhandle;
  }

  bool register_all() {
    source_mr_ = register_memory("regMr", kSender, source_.data(), nccl::kPtrHost);
    if (source_mr_ == nullptr) return false;
    target_mr_ = register_memory("regMr", kReceiver, target_.data(), nccl::kPtrHost);
    if (target_mr_ == nullptr) return false;
    device_mr_ = register_memory("regMr of GPU memory", kReceiver, device_.data(), nccl::kPtrCuda);
    return device_mr_ != nullptr && register_dmabuf();
  }
  bool register_dmabuf() {
    if (!dmabuf_.is_mapped()) {
      add_violation("no file for a dma-buf");
      return false;
    }
    if (!succeeded("regMrDmaBuf", net_.reg_mr_dmabuf(comm_[kReceiver], dmabuf_.data(), kBufferBytes, nccl::kPtrCuda, 0,
                                                     dmabuf_.fd(), &dmabuf_mr_))) {
      return false;
    }
    registrations_.emplace_back(comm_[kReceiver], dmabuf_mr_);
    return true;
  }

  bool exchange_all() {
    bool ok = true;
    // More messages than posted receives, so that receives are posted again.
    for (std::size_t i = 0; ok && i < 20; ++i) ok = exchange({{i * 64, 64, 64}});
    ok = ok && exchange({{0, 0, 0}}) && exchange({{5, 70'000, 80'000}});
    if (group_) {
      ok = ok && exchange({{0, 1000, 1000}, {4096, 0, 0}, {8192, 3000, 3000}});
      ok = ok && exchange({{100, 10, 1000}, {4096, 2000, 4000}});
    }
    ok = ok && exchange({{4096, 4096, 4096}}, device_.data(), device_mr_) && flush();
    ok = ok && exchange({{100, 5000, 8192}}, dmabuf_.data(), dmabuf_mr_);
    for (std::size_t i = 0; ok && i < 3 && net_.api_version() >= netapi::kOldestWithOptionalReceives; ++i) {
      ok = exchange({{i * 500, 500, 500}}, nullptr, nullptr, true);
    }
    return ok;
  }

  // Sends and receives one group; when one end fails, waits for the error at the other end.
  bool exchange(const std::vector<Message>& group, unsigned char* target = nullptr, void* mhandle = nullptr,
                bool optional = false) {
    if (target == nullptr) target = target_.data();
    if (mhandle == nullptr) mhandle = target_mr_;
    std::fill_n(target, kBufferBytes, static_cast<unsigned char>(0));
    struct PendingRequest {
      Side side;
      std::size_t member;
      void* request;
      bool posted;
      bool done;
    };
    std::vector<PendingRequest> pending;
    pending.push_back(
        {kReceiver, 0, optional ? reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion) : nullptr, false, false});
    for (std::size_t i = 0; i < group.size(); ++i) pending.push_back({kSender, i, nullptr, false, false});
    std::array<int, netapi::kMaxGroup> sizes{};

    const auto post = [&](PendingRequest& entry) {
      void* request = entry.request;
      Result result{};
      if (entry.side == kSender) {
        const Message& message = group[entry.member];
        result = net_.isend(comm_[kSender], source_.data() + message.offset, message.bytes,
                            static_cast<int>(entry.member), message.bytes == 0 ? nullptr : source_mr_, &request);
        if (!succeeded("isend", result)) return false;
      } else {
        std::array<void*, netapi::kMaxGroup> data{};
        std::array<std::size_t, netapi::kMaxGroup> capacities{};
        std::array<int, netapi::kMaxGroup> tags{};
        std::array<void*, netapi::kMaxGroup> mhandles{};
        for (std::size_t i = 0; i < group.size(); ++i) {
          data[i] = target + group[i].offset;
          capacities[i] = group[i].capacity;
          tags[i] = static_cast<int>(i);
          mhandles[i] = group[i].capacity == 0 ? nullptr : mhandle;
        }
        result = net_.irecv(comm_[kReceiver], static_cast<int>(group.size()), data.data(), capacities.data(),
                            tags.data(), mhandles.data(), &request);
        if (!succeeded("irecv", result)) return false;
      }
      entry.posted = request != nullptr;
      if (entry.posted) entry.request = request;
      return true;
    };
    const auto test = [&](PendingRequest& entry) {
      int done = 0;
      const bool receives = entry.side == kReceiver;
      if (!succeeded(receives ? "test of a receive" : "test of a send",
                     net_.test(entry.request, &done, receives ? sizes.data() : nullptr)))
        return false;
      entry.done = done != 0;
      return true;
    };
    const auto both_open = [&] { return comm_[kSender] != nullptr && comm_[kReceiver] != nullptr; };
    // A comm that has failed is closed, as NCCL's abort does; then the other end must fail too.
    const bool settled = eventually([&] {
      bool all_done = true;
      bool sends_refused = false;
      for (PendingRequest& entry : pending) {
        if (entry.done || comm_[entry.side] == nullptr) continue;
        if (entry.side == kSender && !entry.posted && sends_refused) continue;
        if (!(entry.posted ? test(entry) : post(entry))) {
          close(entry.side);
          continue;
        }
        if (entry.side == kSender && !entry.posted) sends_refused = true;
        all_done = all_done && entry.done;
      }
      return all_done;
    });
    if (!settled) add_violation("isend, irecv or test did not end");
    if (!settled || !both_open()) return false;
    const auto arrived = [&] {
      for (const Message& message : group) {
        for (std::size_t i = 0; i < message.bytes; ++i) {
          if (target[message.offset + i] != content(message.offset + i)) return false;
        }
      }
      return true;
    };
    if (!(optional ? eventually(arrived) : arrived())) add_violation("wrong bytes in a completed receive");
    for (std::size_t i = 0; i < group.size() && !optional; ++i) {
      if (static_cast<std::size_t>(sizes[i]) != group[i].bytes) add_violation("wrong size of a completed receive");
    }
    return true;
  }

  bool flush() {
    void* data = device_.data();
    int size = 4096;
    void* request = nullptr;
    int done = 0;
    if (!succeeded("iflush", net_.iflush(comm_[kReceiver], 1, &data, &size, &device_mr_, &request))) return false;
    bool ok = true;
    const bool settled = request == nullptr || eventually([&] {
                           ok = succeeded("test of a flush", net_.test(request, &done, nullptr));
                           return !ok || done != 0;
                         });
    if (!settled) add_violation("a flush did not end");
    return ok && settled;
  }

  // Reads the state of the connections from the monitor's state socket, if VERBATIM_STATE_SOCKET is set. A rejected
  // reader reads the end of the file at once.
  void read_state() {
    const char* const path = std::getenv("VERBATIM_STATE_SOCKET");
    if (path == nullptr) return;
    const verbatim::UniqueFd reader(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::string(path).copy(address.sun_path, sizeof address.sun_path - 1);
    const timeval longest{.tv_sec = std::chrono::seconds(kTimeout).count(), .tv_usec = 0};
    ::setsockopt(reader.get(), SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest);
    if (::connect(reader.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return;
    std::array<char, 4096> piece;
    ssize_t count = 0;
    while ((count = ::recv(reader.get(), piece.data(), piece.size(), 0)) > 0) {
      outcome_.state.append(piece.data(), static_cast<std::size_t>(count));
    }
    if (count < 0 && errno == EAGAIN) add_violation("a reply on the state socket did not end");
  }

  void close(Side side) {
    void* const comm = std::exchange(comm_[side], nullptr);
    if (comm == nullptr) return;
    if (side == kSender) {
      succeeded("closeSend", net_.close_send(comm));
    } else {
      succeeded("closeRecv", net_.close_recv(comm));
    }
  }

  void close_all() {
    for (const auto& [comm, mhandle] : registrations_) {
      succeeded("deregMr", net_.dereg_mr(comm, mhandle));
    }
    close(kSender);
    close(kReceiver);
  }

  netapi::Plugin& net_;
  LifetimeResult& outcome_;
  void* context_ = nullptr;
  std::array<void*, 2> comm_{};
  bool group_ = false;
  std::vector<unsigned char> source_;
  std::vector<unsigned char> target_ = std::vector<unsigned char>(kBufferBytes);
  std::vector<unsigned char> device_ = std::vector<unsigned char>(kBufferBytes);  // in place of GPU memory
  const DmaBuf dmabuf_{kBufferBytes};
  void* source_mr_ = nullptr;
  void* target_mr_ = nullptr;
  void* device_mr_ = nullptr;
  void* dmabuf_mr_ = nullptr;
  std::vector<std::pair<void*, void*>> registrations_;  // comm, mhandle
};

}  // namespace

LifetimeResult run_lifetime(int version, const Hooks& hooks) {
  LifetimeResult outcome;
  std::mutex mutex;
  netapi::set_log_callback([&](const netapi::LogLine& line) {
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    const std::lock_guard lock(mutex);
    outcome.warnings.push_back(line.text);
  });
  netapi::Opened library = netapi::open_plugin(conformance::options().plugin, version);
  if (library.plugin == nullptr) {
    outcome.violation = library.error;
    return outcome;
  }
  if (hooks.loaded) hooks.loaded();
  PluginLifetime(*library.plugin, outcome).run();
  library.plugin.reset();
  if (hooks.unloaded) hooks.unloaded();
  netapi::set_log_callback({});
  return outcome;
}

}  // namespace fault
