#include "plugin_lifetime.h"

#include <sys/mman.h>
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
#include "netapi/log.h"
#include "netapi/plugin.h"

namespace fault {
namespace {

using conformance::Clock;
using nccl::Result;

constexpr std::size_t kBufferBytes = 128 << 10;
constexpr auto kLongest = std::chrono::seconds(10);

bool eventually(const std::function<bool()>& poll) {
  return conformance::eventually(poll, kLongest);
}

struct Message {
  std::size_t offset;  // in both buffers
  std::size_t bytes;
  std::size_t room;
};

unsigned char content(std::size_t at) {
  return static_cast<unsigned char>(at * 7 + at / 251 + 1);
}

// Stands for a GPU's memory of which there is a dma-buf: softverbs takes any file that can be mapped.
class DmaBuf {
 public:
  DmaBuf() : file_(::memfd_create("dma-buf", MFD_CLOEXEC)) {
    if (::ftruncate(file_.get(), kBufferBytes) != 0) return;
    pages_ = ::mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  }
  ~DmaBuf() {
    if (is_there()) ::munmap(pages_, kBufferBytes);
  }
  DmaBuf(const DmaBuf&) = delete;
  DmaBuf& operator=(const DmaBuf&) = delete;

  bool is_there() const { return pages_ != MAP_FAILED; }
  int fd() const { return file_.get(); }
  unsigned char* data() const { return static_cast<unsigned char*>(pages_); }

 private:
  const verbatim::UniqueFd file_;
  void* pages_ = MAP_FAILED;
};

class PluginLifetime {
 public:
  PluginLifetime(netapi::Plugin& net, LifetimeResult& outcome) : net_(net), outcome_(outcome), source_(kBufferBytes) {
    for (std::size_t i = 0; i < source_.size(); ++i) source_[i] = content(i);
  }

  void run() {
    if (!good("init", net_.init(0x1234, {}, &context_))) return;
    if (describe() && connect() && register_all()) exchange_all();
    ask_state();
    end();
    good("finalize", net_.finalize(context_));
  }

 private:
  enum Side : std::size_t { kSender, kReceiver };

  bool good(const char* call, Result result) {
    if (result != Result::kSuccess && outcome_.failed.empty()) {
      outcome_.failed = std::string(call) + ": " + netapi::result_name(result);
    }
    return result == Result::kSuccess;
  }
  void add_violation(std::string what) {
    if (outcome_.violation.empty()) outcome_.violation = std::move(what);
  }

  bool describe() {
    int count = 0;
    netapi::Properties properties;
    if (!good("devices", net_.devices(&count)) || !good("getProperties", net_.properties(0, &properties))) return false;
    group_ = properties.max_recvs > 1;
    return true;
  }

  bool connect() {
    conformance::Handle handle;
    void* listen_comm = nullptr;
    if (!good("listen", net_.listen(context_, 0, handle.bytes, &listen_comm))) return false;
    bool connects = true;
    bool accepts = true;
    const auto close_listen = [&] {
      if (void* const closing = std::exchange(listen_comm, nullptr); closing != nullptr) {
        good("closeListen", net_.close_listen(closing));
      }
    };
    const bool settled = eventually([&] {
      if (connects && comm_[kSender] == nullptr) {
        connects = good("connect", net_.connect(context_, 0, handle.bytes, &comm_[kSender]));
      }
      if (accepts && connects && comm_[kReceiver] == nullptr) {
        accepts = good("accept", net_.accept(listen_comm, &comm_[kReceiver]));
        if (!accepts) close_listen();
      }
      // One end that has failed is answer enough for the listening one; the connecting one must hear of it.
      return !connects || (comm_[kSender] != nullptr && (!accepts || comm_[kReceiver] != nullptr));
    });
    if (!settled) add_violation("no end of connect or accept");
    close_listen();
    return comm_[kSender] != nullptr && comm_[kReceiver] != nullptr;
  }

  void* add(const char* call, Side side, void* data, int type) {
    void* mhandle = nullptr;
    if (!good(call, net_.reg_mr(comm_[side], data, kBufferBytes, type, &mhandle))) return nullptr;
    registrations_.emplace_back(comm_[side], mhandle);
    return mhandle;
  }

  bool register_all() {
    source_mr_ = add("regMr", kSender, source_.data(), nccl::kPtrHost);
    if (source_mr_ == nullptr) return false;
    target_mr_ = add("regMr", kReceiver, target_.data(), nccl::kPtrHost);
    if (target_mr_ == nullptr) return false;
    device_mr_ = add("regMr of GPU memory", kReceiver, device_.data(), nccl::kPtrCuda);
    return device_mr_ != nullptr && register_dmabuf();
  }
  bool register_dmabuf() {
    if (!dmabuf_.is_there()) {
      add_violation("no file for a dma-buf");
      return false;
    }
    if (!good("regMrDmaBuf", net_.reg_mr_dmabuf(comm_[kReceiver], dmabuf_.data(), kBufferBytes, nccl::kPtrCuda, 0,
                                                dmabuf_.fd(), &dmabuf_mr_))) {
      return false;
    }
    registrations_.emplace_back(comm_[kReceiver], dmabuf_mr_);
    return true;
  }

  bool exchange_all() {
    bool sound = true;
    // Enough for receives to be posted again.
    for (std::size_t i = 0; sound && i < 20; ++i) sound = exchange({{i * 64, 64, 64}});
    sound = sound && exchange({{0, 0, 0}}) && exchange({{5, 70'000, 80'000}});
    if (group_) {
      sound = sound && exchange({{0, 1000, 1000}, {4096, 0, 0}, {8192, 3000, 3000}});
      sound = sound && exchange({{100, 10, 1000}, {4096, 2000, 4000}});
    }
    sound = sound && exchange({{4096, 4096, 4096}}, device_.data(), device_mr_) && flush();
    sound = sound && exchange({{100, 5000, 8192}}, dmabuf_.data(), dmabuf_mr_);
    for (std::size_t i = 0; sound && i < 3 && net_.api_version() >= netapi::kOldestWithOptionalReceives; ++i) {
      sound = exchange({{i * 500, 500, 500}}, nullptr, nullptr, true);
    }
    return sound;
  }

  // One group, sent and received, or the error at both ends.
  bool exchange(const std::vector<Message>& group, unsigned char* target = nullptr, void* mhandle = nullptr,
                bool optional = false) {
    if (target == nullptr) target = target_.data();
    if (mhandle == nullptr) mhandle = target_mr_;
    std::fill_n(target, kBufferBytes, static_cast<unsigned char>(0));
    struct Open {
      Side side;
      std::size_t member;
      void* request;
      bool posted;
      bool done;
    };
    std::vector<Open> open;
    open.push_back(
        {kReceiver, 0, optional ? reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion) : nullptr, false, false});
    for (std::size_t i = 0; i < group.size(); ++i) open.push_back({kSender, i, nullptr, false, false});
    std::array<int, netapi::kMaxGroup> sizes{};

    const auto post = [&](Open& one) {
      void* request = one.request;
      Result result{};
      if (one.side == kSender) {
        const Message& message = group[one.member];
        result = net_.isend(comm_[kSender], source_.data() + message.offset, message.bytes,
                            static_cast<int>(one.member), message.bytes == 0 ? nullptr : source_mr_, &request);
        if (!good("isend", result)) return false;
      } else {
        std::array<void*, netapi::kMaxGroup> data{};
        std::array<std::size_t, netapi::kMaxGroup> room{};
        std::array<int, netapi::kMaxGroup> tags{};
        std::array<void*, netapi::kMaxGroup> mhandles{};
        for (std::size_t i = 0; i < group.size(); ++i) {
          data[i] = target + group[i].offset;
          room[i] = group[i].room;
          tags[i] = static_cast<int>(i);
          mhandles[i] = group[i].room == 0 ? nullptr : mhandle;
        }
        result = net_.irecv(comm_[kReceiver], static_cast<int>(group.size()), data.data(), room.data(), tags.data(),
                            mhandles.data(), &request);
        if (!good("irecv", result)) return false;
      }
      one.posted = request != nullptr;
      if (one.posted) one.request = request;
      return true;
    };
    const auto test = [&](Open& one) {
      int done = 0;
      const bool receives = one.side == kReceiver;
      if (!good(receives ? "test of a receive" : "test of a send",
                net_.test(one.request, &done, receives ? sizes.data() : nullptr)))
        return false;
      one.done = done != 0;
      return true;
    };
    const auto sound = [&] { return comm_[kSender] != nullptr && comm_[kReceiver] != nullptr; };
    // An end that has failed is closed, as NCCL's abort does; then the other one must hear of it.
    const bool settled = eventually([&] {
      bool over = true;
      bool sends_refused = false;
      for (Open& one : open) {
        if (one.done || comm_[one.side] == nullptr) continue;
        if (one.side == kSender && !one.posted && sends_refused) continue;
        if (!(one.posted ? test(one) : post(one))) {
          close(one.side);
          continue;
        }
        if (one.side == kSender && !one.posted) sends_refused = true;
        over = over && one.done;
      }
      return over;
    });
    if (!settled) add_violation("no end of isend, irecv and test");
    if (!settled || !sound()) return false;
    const auto arrived = [&] {
      for (const Message& message : group) {
        for (std::size_t i = 0; i < message.bytes; ++i) {
          if (target[message.offset + i] != content(message.offset + i)) return false;
        }
      }
      return true;
    };
    if (!(optional ? eventually(arrived) : arrived())) add_violation("wrong bytes in a receive that is done");
    for (std::size_t i = 0; i < group.size() && !optional; ++i) {
      if (static_cast<std::size_t>(sizes[i]) != group[i].bytes) add_violation("wrong size of a receive that is done");
    }
    return true;
  }

  bool flush() {
    void* data = device_.data();
    int size = 4096;
    void* request = nullptr;
    int done = 0;
    if (!good("iflush", net_.iflush(comm_[kReceiver], 1, &data, &size, &device_mr_, &request))) return false;
    bool sound = true;
    const bool settled = request == nullptr || eventually([&] {
                           sound = good("test of a flush", net_.test(request, &done, nullptr));
                           return !sound || done != 0;
                         });
    if (!settled) add_violation("no end of a flush");
    return sound && settled;
  }

  // Reads what the control thread says of the connections, if it has been asked to listen for readers. What it refuses
  // ends at once.
  void ask_state() {
    const char* const path = std::getenv("VERBATIM_STATE_SOCKET");
    if (path == nullptr) return;
    const verbatim::UniqueFd reader(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::string(path).copy(address.sun_path, sizeof address.sun_path - 1);
    const timeval longest{.tv_sec = std::chrono::seconds(kLongest).count(), .tv_usec = 0};
    ::setsockopt(reader.get(), SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest);
    if (::connect(reader.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return;
    std::array<char, 4096> piece;
    ssize_t count = 0;
    while ((count = ::recv(reader.get(), piece.data(), piece.size(), 0)) > 0) {
      outcome_.state.append(piece.data(), static_cast<std::size_t>(count));
    }
    if (count < 0 && errno == EAGAIN) add_violation("no end of an answer on the state socket");
  }

  void close(Side side) {
    void* const comm = std::exchange(comm_[side], nullptr);
    if (comm == nullptr) return;
    if (side == kSender) {
      good("closeSend", net_.close_send(comm));
    } else {
      good("closeRecv", net_.close_recv(comm));
    }
  }

  void end() {
    for (const auto& [comm, mhandle] : registrations_) {
      good("deregMr", net_.dereg_mr(comm, mhandle));
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
  std::vector<unsigned char> device_ = std::vector<unsigned char>(kBufferBytes);  // stands for the GPU's
  const DmaBuf dmabuf_;
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
  netapi::Opened opened = netapi::open_plugin(conformance::options().plugin, version);
  if (opened.plugin == nullptr) {
    outcome.violation = opened.error;
    return outcome;
  }
  if (hooks.loaded) hooks.loaded();
  PluginLifetime(*opened.plugin, outcome).run();
  opened.plugin.reset();
  if (hooks.unloaded) hooks.unloaded();
  netapi::set_log_callback({});
  return outcome;
}

}  // namespace fault
