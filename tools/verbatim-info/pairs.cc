#include "verbatim-info/pairs.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "netapi/log.h"
#include "netapi/plugin.h"
#include "ranks/connections.h"
#include "ranks/failure.h"
#include "ranks/statistics.h"
#include "verbatim-info/pair_report.h"
#include "verbatim-info/pair_schedule.h"
#include "verbatim-info/report.h"

namespace verbatim::info {
namespace {

using Json = nlohmann::ordered_json;
using ranks::Handle;

// Names and log lines can have bytes that are not UTF-8.
std::string text_of(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

constexpr std::uint64_t kStepTimeoutNs = 10 * kNanosecondsPerSecond;  // to connect all links of a pair; to measure one
constexpr std::size_t kMessageBytes = std::size_t{1} << 20U;
constexpr std::size_t kWindow = 8;       // messages under way
constexpr std::size_t kMessages = 24;    // of one measurement of the bandwidth
constexpr std::size_t kBursts = 3;       // measurements of each direction, of which the best counts
constexpr std::size_t kRoundTrips = 50;  // whose median is the latency
constexpr std::size_t kSmallBytes = 8;
constexpr std::size_t kGivenUpAfter = 3;  // partners with which a port has failed, and it works with none

// The plugin's last warning: it says why a call has failed.
class LastWarning {
 public:
  LastWarning() {
    netapi::set_log_callback([this](const netapi::LogLine& line) {
      if (line.level != nccl::DebugLogLevel::kWarn) return;
      const std::lock_guard<std::mutex> lock(mutex_);
      const std::size_t prefix = line.text.find(" : ");  // "NET/Verbatim : "
      text_ = line.text.starts_with("NET/") && prefix != std::string::npos ? line.text.substr(prefix + 3) : line.text;
    });
  }
  LastWarning(const LastWarning&) = delete;
  LastWarning& operator=(const LastWarning&) = delete;
  ~LastWarning() { netapi::set_log_callback({}); }

  std::string take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(text_, {});
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// What ends the test of one link; the others go on.
struct LinkFailure {
  std::string why;
};

class Deadline {
 public:
  explicit Deadline(std::string what) : what_(std::move(what)), end_ns_(monotonic_ns() + kStepTimeoutNs) {}
  bool is_over() const { return monotonic_ns() >= end_ns_; }
  // Between two attempts of a call that does not block.
  void pause() const {
    if (is_over())
      throw LinkFailure{what_ + " within " + std::to_string(kStepTimeoutNs / kNanosecondsPerSecond) + " s"};
    sched_yield();
  }

 private:
  const std::string what_;
  const std::uint64_t end_ns_;
};

// Both directions between a port of this host and one of its partner.
struct Link {
  int own_port;
  int other_port;
  Handle own_handle{};
  Handle other_handle{};
  void* listen = nullptr;
  void* send = nullptr;
  void* receive = nullptr;
  void* send_memory = nullptr;
  void* receive_memory = nullptr;
  std::string error = {};
  double latency_us = 0;
  double gb_s = 0;  // of what this host sends

  bool is_connected() const { return send != nullptr && receive != nullptr; }
};

class PairRank final : public ranks::Rank {
 public:
  PairRank(const PairOptions& options, ranks::CoordinatorConnection& coordinator)
      : options_(options), coordinator_(coordinator), buffer_(2 * kWindow * kMessageBytes) {}

  ranks::ExitStatus run() override {
    const PairHost own = open();
    PairReport report;
    for (const std::string& text : coordinator_.all_gather(text_of(own))) {
      report.hosts.push_back(nlohmann::json::parse(text).get<PairHost>());
    }
    failed_with_.resize(own.ports.size());
    works_.resize(own.ports.size());
    for (int round = 0; round < pair_rounds(ranks()); ++round) run_round(round, report.hosts);
    if (context_is_open_) require(plugin_->finalize(context_), "finalize");
    for (const std::string& text : coordinator_.all_gather(text_of(sent_))) {
      for (const auto& link : nlohmann::json::parse(text)) report.links.push_back(link.get<PairLink>());
    }
    if (options_.job.rank == 0) print(report);
    return report.findings().empty() ? ranks::ExitStatus::kOk : ranks::ExitStatus::kWrong;
  }

 private:
  int ranks() const { return options_.job.nranks; }

  void print(const PairReport& report) const {
    if (options_.as_json) {
      std::fputs((report.json().dump(1, ' ', false, Json::error_handler_t::replace) + "\n").c_str(), stdout);
    } else {
      report.print(stdout);
    }
    std::fflush(stdout);
  }

  // Opens the plugin. A host on which that fails takes part in the rounds, so that the others are tested.
  PairHost open() {
    PairHost host;
    char name[256] = "";
    ::gethostname(name, sizeof name - 1);
    host.name = std::string(name) + "[" + std::to_string(options_.job.rank) + "]";
    const Json described = make_report(std::nullopt, "");
    netapi::Opened opened = netapi::open_plugin(options_.plugin);
    if (!opened.plugin) throw ranks::Failure(opened.error);
    plugin_ = std::move(opened.plugin);
    int count = 0;
    const nccl::Result result = plugin_->init(coordinator_.comm_id(), {}, &context_);
    context_is_open_ = result == nccl::Result::kSuccess;
    if (context_is_open_) require(plugin_->devices(&count), "devices");
    for (int device = 0; device < count; ++device) {
      netapi::Properties properties;
      require(plugin_->properties(device, &properties), "getProperties");
      host.ports.push_back(port_of(described, properties));
    }
    if (host.ports.empty()) host.why_no_port = why("init", result);
    return host;
  }

  static PairPort port_of(const Json& described, const netapi::Properties& properties) {
    PairPort found{.name = netapi::verbs_name(properties),
                   .link_layer = {},
                   .gid_type = {},
                   .mtu = 0,
                   .speed_mbps = static_cast<unsigned>(std::max(properties.speed, 0))};
    for (const Json& device : described.at("devices")) {
      for (const Json& port : device.at("ports")) {
        if (port.value("nccl_name", "") != properties.name || !port.contains("gids")) continue;
        found.link_layer = port.at("link_layer");
        found.mtu = port.at("mtu");
        for (const Json& gid : port.at("gids")) {
          if (gid.at("taken")) found.gid_type = gid.at("type");
        }
      }
    }
    return found;
  }

  static void require(nccl::Result result, const char* call) {
    if (result == nccl::Result::kSuccess) return;
    throw ranks::Failure(std::string(call) + ": " + netapi::result_name(result));
  }

  std::string why(const char* call, nccl::Result result) {
    const std::string warning = warning_.take();
    return warning.empty() ? std::string(call) + ": " + netapi::result_name(result) : warning;
  }

  void check(const char* call, nccl::Result result) {
    if (result != nccl::Result::kSuccess) throw LinkFailure{why(call, result)};
  }

  // ---- a round

  // What each rank tells all others before a round: which of its ports are given up, and the handles of its links.
  void run_round(int round, const std::vector<PairHost>& hosts) {
    const std::optional<int> partner = pair_partner(options_.job.rank, ranks(), round);
    std::vector<Link> links;
    if (partner) links = links_to(hosts[own_index()], hosts[static_cast<std::size_t>(*partner)]);
    std::string own;
    for (std::size_t port = 0; port < failed_with_.size(); ++port) own.push_back(is_given_up(port) ? 'x' : '.');
    static_cast<void>(warning_.take());
    for (Link& link : links) {
      const nccl::Result result = plugin_->listen(context_, link.own_port, link.own_handle.data(), &link.listen);
      if (result != nccl::Result::kSuccess) link.error = why("listen", result);
      own.append(link.own_handle.data(), link.own_handle.size());
    }
    const std::vector<std::string> all = coordinator_.all_gather(own);
    if (!partner) return;
    read_handles(all[static_cast<std::size_t>(*partner)], hosts[static_cast<std::size_t>(*partner)].ports.size(),
                 links);
    connect(links);
    for (Link& link : links) measure(link, options_.job.rank < *partner);
    for (Link& link : links) finish(link, *partner);
  }

  std::size_t own_index() const { return static_cast<std::size_t>(options_.job.rank); }
  bool is_given_up(std::size_t port) const { return !works_[port] && failed_with_[port].size() >= kGivenUpAfter; }

  // Ports with the same index, which NCCL connects if it can; with different numbers of ports each is in one link at
  // least.
  static std::vector<Link> links_to(const PairHost& own, const PairHost& other) {
    std::vector<Link> links;
    if (own.ports.empty() || other.ports.empty()) return links;
    for (std::size_t i = 0; i < std::max(own.ports.size(), other.ports.size()); ++i) {
      links.push_back(
          {.own_port = static_cast<int>(i % own.ports.size()), .other_port = static_cast<int>(i % other.ports.size())});
    }
    return links;
  }

  void read_handles(const std::string& text, std::size_t other_ports, std::vector<Link>& links) const {
    if (text.size() != other_ports + links.size() * sizeof(Handle)) {
      throw ranks::Failure("a rank has another number of links than its partner");
    }
    for (std::size_t i = 0; i < links.size(); ++i) {
      std::memcpy(links[i].other_handle.data(), text.data() + other_ports + i * sizeof(Handle), sizeof(Handle));
      const bool other_given_up = text[static_cast<std::size_t>(links[i].other_port)] == 'x';
      if (!links[i].error.empty() || (!other_given_up && !is_given_up(static_cast<std::size_t>(links[i].own_port))))
        continue;
      links[i].error = std::string(kNotTried) + "one of these ports has failed with its first " +
                       std::to_string(kGivenUpAfter) + " partners";
    }
  }

  void connect(std::vector<Link>& links) {
    const Deadline deadline("");
    for (bool all = false; !all;) {
      all = true;
      for (Link& link : links) {
        if (!link.error.empty() || link.is_connected()) continue;
        try {
          if (link.send == nullptr) {
            check("connect", plugin_->connect(context_, link.own_port, link.other_handle.data(), &link.send));
          }
          if (link.receive == nullptr) check("accept", plugin_->accept(link.listen, &link.receive));
          if (!link.is_connected() && deadline.is_over()) throw LinkFailure{unconnected(link)};
        } catch (const LinkFailure& failure) {
          link.error = failure.why;
          close(link);
        }
        all = all && (!link.error.empty() || link.is_connected());
      }
      if (!all) sched_yield();
    }
  }

  std::string unconnected(const Link& link) {
    const std::string warning = warning_.take();
    return std::string(link.send == nullptr ? "connect" : "accept") + " has not ended within " +
           std::to_string(kStepTimeoutNs / kNanosecondsPerSecond) + " s" + (warning.empty() ? "" : ": " + warning);
  }

  // ---- measurements

  // Both ends make the same steps in the same order. `first`: this end begins.
  void measure(Link& link, bool first) {
    if (!link.error.empty()) return;
    try {
      check("regMr", plugin_->reg_mr(link.send, buffer_.data(), buffer_.size(), nccl::kPtrHost, &link.send_memory));
      check("regMr",
            plugin_->reg_mr(link.receive, buffer_.data(), buffer_.size(), nccl::kPtrHost, &link.receive_memory));
      const Deadline deadline("it is connected, but a message does not arrive");
      measure_latency(link, first, deadline);
      for (std::size_t burst = 0; burst < kBursts; ++burst) {
        if (!first) receive_burst(link, deadline);
        link.gb_s = std::max(link.gb_s, send_burst(link, deadline));
        if (first) receive_burst(link, deadline);
      }
    } catch (const LinkFailure& failure) {
      const std::string warning = warning_.take();
      link.error = failure.why + (warning.empty() ? "" : ": " + warning);
      close(link);  // so that the other end does not wait for its own timeout
    }
  }

  void measure_latency(Link& link, bool first, const Deadline& deadline) {
    std::vector<double> round_trips_ns;
    for (std::size_t i = 0; i < kRoundTrips; ++i) {
      const std::uint64_t begin = monotonic_ns();
      void* const receive = post_receive(link, 0, kSmallBytes, deadline);
      if (!first) await(receive, deadline);
      await(post_send(link, 0, kSmallBytes, deadline), deadline);
      if (first) await(receive, deadline);
      round_trips_ns.push_back(static_cast<double>(monotonic_ns() - begin));
    }
    // The other end's times contain its wait for the first message.
    link.latency_us = ranks::percentile(round_trips_ns, 0.5) / 2 / 1000;
  }

  // Returns 10^9 bytes a second.
  double send_burst(Link& link, const Deadline& deadline) {
    const std::uint64_t begin = monotonic_ns();
    std::deque<void*> outstanding;
    for (std::size_t i = 0; i < kMessages; ++i) {
      if (outstanding.size() == kWindow) await_oldest(outstanding, deadline);
      outstanding.push_back(post_send(link, i % kWindow, kMessageBytes, deadline));
    }
    while (!outstanding.empty()) await_oldest(outstanding, deadline);
    return static_cast<double>(kMessages * kMessageBytes) / static_cast<double>(monotonic_ns() - begin);
  }

  void receive_burst(Link& link, const Deadline& deadline) {
    std::deque<void*> outstanding;
    for (std::size_t i = 0; i < kMessages; ++i) {
      if (outstanding.size() == kWindow) await_oldest(outstanding, deadline);
      outstanding.push_back(post_receive(link, i % kWindow, kMessageBytes, deadline));
    }
    while (!outstanding.empty()) await_oldest(outstanding, deadline);
  }

  void await_oldest(std::deque<void*>& outstanding, const Deadline& deadline) {
    await(outstanding.front(), deadline);
    outstanding.pop_front();
  }

  void* post_send(Link& link, std::size_t place, std::size_t bytes, const Deadline& deadline) {
    for (void* request = nullptr;; deadline.pause()) {
      check("isend",
            plugin_->isend(link.send, buffer_.data() + place * kMessageBytes, bytes, 0, link.send_memory, &request));
      if (request != nullptr) return request;
    }
  }

  void* post_receive(Link& link, std::size_t place, std::size_t bytes, const Deadline& deadline) {
    void* data = buffer_.data() + (kWindow + place) * kMessageBytes;
    int tag = 0;
    for (void* request = nullptr;; deadline.pause()) {
      std::size_t size = bytes;
      check("irecv", plugin_->irecv(link.receive, 1, &data, &size, &tag, &link.receive_memory, &request));
      if (request != nullptr) return request;
    }
  }

  void await(void* request, const Deadline& deadline) {
    for (int done = 0;; deadline.pause()) {
      int size = 0;
      check("test", plugin_->test(request, &done, &size));
      if (done != 0) return;
    }
  }

  // ---- the end of a round

  void close(Link& link) {
    if (link.send_memory != nullptr) plugin_->dereg_mr(link.send, std::exchange(link.send_memory, nullptr));
    if (link.receive_memory != nullptr) plugin_->dereg_mr(link.receive, std::exchange(link.receive_memory, nullptr));
    if (link.send != nullptr) plugin_->close_send(std::exchange(link.send, nullptr));
    if (link.receive != nullptr) plugin_->close_recv(std::exchange(link.receive, nullptr));
    if (link.listen != nullptr) plugin_->close_listen(std::exchange(link.listen, nullptr));
  }

  void finish(Link& link, int partner) {
    close(link);
    const auto port = static_cast<std::size_t>(link.own_port);
    if (link.error.empty()) {
      works_[port] = true;
    } else {
      failed_with_[port].insert(partner);
    }
    sent_.push_back({.from = options_.job.rank,
                     .from_port = link.own_port,
                     .to = partner,
                     .to_port = link.other_port,
                     .error = link.error,
                     .latency_us = link.latency_us,
                     .gb_s = link.gb_s});
  }

  const PairOptions options_;
  ranks::CoordinatorConnection& coordinator_;
  LastWarning warning_;
  std::vector<std::byte> buffer_;  // kWindow messages to send, and as many to receive
  std::unique_ptr<netapi::Plugin> plugin_;
  void* context_ = nullptr;
  bool context_is_open_ = false;
  std::vector<std::set<int>> failed_with_;  // by own port
  std::vector<bool> works_;                 // by own port, with any partner
  std::vector<PairLink> sent_;
};

}  // namespace

std::unique_ptr<ranks::Rank> make_pair_rank(const PairOptions& options, ranks::CoordinatorConnection& coordinator) {
  return std::make_unique<PairRank>(options, coordinator);
}

}  // namespace verbatim::info
