//: program roce-peer link=netapi,workload,base,threads

// Two processes of this program on two hosts make one connection after the other and send messages over it, as NCCL
// does.
//
//   roce-peer --plugin PATH --serve PORT      receives
//   roce-peer --plugin PATH --call HOST:PORT  sends
//     --rounds N        connections, one after the other (default 1); the plugin is initialized once
//     --messages N      messages per connection (default 8); 0: until an error
//     --bytes N         bytes per message (default 100000)
//     --merge N         over the first N devices, as one
//     --hold N          posts no more than N receives of a connection until the file exists
//     --wait-for FILE   that file; without --hold, it must exist before the second connection is made, and with
//                       --messages 0 before the plugin closes the connection after an error
//
// Each end closes as soon as its own work is done. Every byte is compared. Prints one line per event. Exit status: 0, 1
// for wrong data, 2 for a failure of this program, 3 for an error of the plugin, 4 for a timeout. At the end it counts
// descriptors and threads: more of them than before the plugin was loaded is a leak.
#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "netapi/log.h"
#include "netapi/plugin.h"
#include "workload/content.h"
#include "workload/verify.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kDeadline = std::chrono::seconds(60);  // for a connection, or one message
constexpr auto kPollInterval = std::chrono::milliseconds(1);
constexpr std::size_t kWindow = 4;  // outstanding messages
// After each message of a stream without end: the processors emulate two machines.
constexpr auto kEndlessPause = std::chrono::milliseconds(5);

constexpr auto kLongPause = std::chrono::milliseconds(50);

struct ExitError : std::runtime_error {
  ExitError(int exit_status, const std::string& text) : std::runtime_error(text), status(exit_status) {}
  int status;
};

struct Options {
  std::string plugin, call, wait_for;
  int serve = 0;
  int rounds = 1;
  int merge = 1;
  std::uint64_t messages = 8;
  std::size_t bytes = 100'000;
  std::uint64_t hold = 0;
  bool sends() const { return !call.empty(); }
};

std::size_t entries(const char* directory) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++count;
  return count;
}

void print_line(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

Clock::time_point g_last_progress = Clock::now();

void throw_on_error(nccl::Result result, const char* call) {
  if (result == nccl::Result::kSuccess) return;
  const std::chrono::duration<double> since = Clock::now() - g_last_progress;
  char text[200];
  std::snprintf(text, sizeof text, "error: %s: %s, %.2f s after the last progress", call, netapi::result_name(result),
                since.count());
  throw ExitError(3, text);
}

// Calls poll() until it returns true.
template <typename Poll>
void wait_for(const char* what, const Poll& poll) {
  while (!poll()) {
    if (Clock::now() > g_last_progress + kDeadline) throw ExitError(4, std::string("timeout: ") + what);
    std::this_thread::sleep_for(kPollInterval);
  }
  g_last_progress = Clock::now();
}

void await_file(const std::string& path) {
  wait_for("waiting for the file of --wait-for", [&] { return std::filesystem::exists(path); });
}

void fail_errno(const char* what) {
  throw ExitError(2, std::string(what) + ": " + std::strerror(errno));
}

// The TCP connection that carries the handle, in place of NCCL's bootstrap.
verbatim::UniqueFd connect_bootstrap(const Options& options) {
  if (options.sends()) {
    const std::size_t colon = options.call.rfind(':');
    addrinfo* found = nullptr;
    addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(options.call.substr(0, colon).c_str(), options.call.substr(colon + 1).c_str(), &wanted, &found) !=
        0) {
      throw ExitError(2, "no such host: " + options.call);
    }
    verbatim::UniqueFd fd;
    wait_for("connecting to the peer process", [&] {
      fd.reset(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      return ::connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0;
    });
    freeaddrinfo(found);
    return fd;
  }
  const verbatim::UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(options.serve));
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail_errno("bind");
  if (listen(listener.get(), 1) != 0) fail_errno("listen");
  verbatim::UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (fd.get() < 0) fail_errno("accept");
  g_last_progress = Clock::now();
  return fd;
}

class Peer {
 public:
  Peer(const Options& options, netapi::Plugin& net, void* context) : options_(options), net_(net), context_(context) {
    if (options.merge == 1) return;
    int devices = 0;
    throw_on_error(net.devices(&devices), "devices");
    if (devices < options.merge) throw ExitError(2, "fewer devices than --merge");
    std::vector<int> members;
    for (int i = 0; i < options.merge; ++i) members.push_back(i);
    throw_on_error(net.make_vdevice(members, &device_), "makeVDevice");
  }

  void run_round(int bootstrap, std::uint64_t round) {
    alignas(8) unsigned char handle[nccl::kNetHandleMaxBytes] = {};
    void* comm = nullptr;
    if (options_.sends()) {
      if (recv(bootstrap, handle, sizeof handle, MSG_WAITALL) != sizeof handle)
        throw ExitError(2, "the peer process has disconnected");
      wait_for("connect", [&] {
        throw_on_error(net_.connect(context_, device_, handle, &comm), "connect");
        return comm != nullptr;
      });
    } else {
      void* listen_comm = nullptr;
      throw_on_error(net_.listen(context_, device_, handle, &listen_comm), "listen");
      if (send(bootstrap, handle, sizeof handle, MSG_NOSIGNAL) != sizeof handle)
        throw ExitError(2, "the peer process has disconnected");
      wait_for("accept", [&] {
        throw_on_error(net_.accept(listen_comm, &comm), "accept");
        return comm != nullptr;
      });
      throw_on_error(net_.close_listen(listen_comm), "closeListen");
    }
    exchange(comm, round);
    throw_on_error(options_.sends() ? net_.close_send(comm) : net_.close_recv(comm), "close");
  }

 private:
  void exchange(void* comm, std::uint64_t round) {
    std::vector<unsigned char> memory(kWindow * options_.bytes);
    void* mhandle = nullptr;
    throw_on_error(net_.reg_mr(comm, memory.data(), memory.size(), nccl::kPtrHost, &mhandle), "regMr");
    void* requests[kWindow] = {};
    std::uint64_t posted = 0;
    std::uint64_t done = 0;
    const auto all = [&](std::uint64_t count) { return options_.messages != 0 && count == options_.messages; };
    while (!all(done)) {
      if (!options_.sends() && options_.hold != 0 && done == options_.hold) {
        print_line("holds");
        await_file(options_.wait_for);
      }
      while (may_post(posted, done) && !all(posted) && post(comm, memory, mhandle, round, posted, requests)) ++posted;
      if (posted == done) {
        wait_for("isend", [&] { return post(comm, memory, mhandle, round, posted, requests); });
        ++posted;
      }
      wait_for("test of a message", [&] {
        int is_done = 0;
        int size = -1;
        throw_on_error(net_.test(requests[done % kWindow], &is_done, &size), "test");
        return is_done != 0;
      });
      if (!options_.sends()) check(memory, round, done);
      report_pause();
      if (++done == 1) print_line("data flows");
      if (options_.messages == 0) std::this_thread::sleep_for(kEndlessPause);
    }
    throw_on_error(net_.dereg_mr(comm, mhandle), "deregMr");
  }

  // Between two messages that are done.
  void report_pause() {
    const Clock::time_point now = Clock::now();
    const auto pause = std::chrono::duration_cast<std::chrono::milliseconds>(now - last_done_);
    if (last_done_ != Clock::time_point() && pause > kLongPause) {
      print_line("pause of " + std::to_string(pause.count()) + " ms");
    }
    last_done_ = now;
  }

  bool may_post(std::uint64_t posted, std::uint64_t done) const {
    const bool held = !options_.sends() && done < options_.hold && posted >= options_.hold;
    return posted - done < kWindow && !held;
  }

  bool post(void* comm, std::vector<unsigned char>& memory, void* mhandle, std::uint64_t round, std::uint64_t message,
            void** requests) {
    void* data = memory.data() + message % kWindow * options_.bytes;
    void*& request = requests[message % kWindow];
    request = nullptr;
    if (options_.sends()) {
      verbatim::workload::Pattern(round, message).produce(data, options_.bytes, 0);
      throw_on_error(net_.isend(comm, data, options_.bytes, 0, mhandle, &request), "isend");
    } else {
      std::size_t size = options_.bytes;
      int tag = 0;
      throw_on_error(net_.irecv(comm, 1, &data, &size, &tag, &mhandle, &request), "irecv");
    }
    return request != nullptr;
  }

  void check(const std::vector<unsigned char>& memory, std::uint64_t round, std::uint64_t message) {
    const unsigned char* const data = memory.data() + message % kWindow * options_.bytes;
    std::vector<unsigned char> expected(options_.bytes);
    verbatim::workload::Pattern(round, message).produce(expected.data(), expected.size(), 0);
    if (!std::equal(expected.begin(), expected.end(), data)) {
      throw ExitError(1, "wrong data in message " + std::to_string(message) + " of round " + std::to_string(round));
    }
  }

  const Options& options_;
  netapi::Plugin& net_;
  void* const context_;
  int device_ = 0;
  Clock::time_point last_done_;
};

int run(const Options& options) {
  netapi::Opened opened = netapi::open_plugin(options.plugin);
  if (opened.plugin == nullptr) throw ExitError(2, opened.error);
  void* context = nullptr;
  throw_on_error(opened.plugin->init(1, {}, &context), "init");
  const verbatim::UniqueFd bootstrap = connect_bootstrap(options);
  int status = 0;
  try {
    Peer peer(options, *opened.plugin, context);
    for (int round = 0; round < options.rounds; ++round) {
      if (round == 1 && options.hold == 0 && !options.wait_for.empty()) await_file(options.wait_for);
      peer.run_round(bootstrap.get(), static_cast<std::uint64_t>(round));
      print_line("round " + std::to_string(round) + " done");
    }
  } catch (const ExitError& error) {
    print_line(error.what());
    status = error.status;
  }
  if (options.messages == 0 && options.hold == 0 && !options.wait_for.empty()) {
    g_last_progress = Clock::now();
    await_file(options.wait_for);
  }
  const auto start = Clock::now();
  throw_on_error(opened.plugin->finalize(context), "finalize");
  const std::chrono::duration<double> took = Clock::now() - start;
  std::printf("finalize took %.2f s\n", took.count());
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < argc; i += 2) given[argv[i]] = argv[i + 1];
  Options options;
  options.plugin = given["--plugin"];
  options.call = given["--call"];
  options.wait_for = given["--wait-for"];
  if (given.contains("--serve")) options.serve = std::stoi(given["--serve"]);
  if (given.contains("--rounds")) options.rounds = std::stoi(given["--rounds"]);
  if (given.contains("--merge")) options.merge = std::stoi(given["--merge"]);
  if (given.contains("--messages")) options.messages = std::stoul(given["--messages"]);
  if (given.contains("--hold")) options.hold = std::stoul(given["--hold"]);
  if (given.contains("--bytes")) options.bytes = std::stoul(given["--bytes"]);
  netapi::set_log_callback([](const netapi::LogLine& line) { print_line("log: " + line.text); });

  const std::size_t descriptors = entries("/proc/self/fd");
  int status = 2;
  try {
    status = run(options);
  } catch (const ExitError& error) {
    print_line(error.what());
    status = error.status;
  }
  netapi::set_log_callback({});
  // A joined thread stays in /proc/self/task for a moment.
  for (int i = 0; i < 5000 && entries("/proc/self/task") > 1; ++i) std::this_thread::sleep_for(kPollInterval);
  std::printf("leaked: %zu descriptors, %zu threads\n", entries("/proc/self/fd") - descriptors,
              entries("/proc/self/task") - 1);
  return status;
}
