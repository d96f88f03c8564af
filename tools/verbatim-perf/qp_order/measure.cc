#include "verbatim-perf/qp_order/measure.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <utility>

#include "ranks/json.h"
#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"
#include "verbatim-perf/child.h"
#include "verbatim-perf/qp_order/figures.h"
#include "verbatim-perf/qp_order/job.h"

namespace verbatim::perf::qp_order {
namespace {

namespace fs = std::filesystem;
using ranks::Json;

constexpr auto kRunTimeout = std::chrono::seconds(120);
constexpr double kNsPerUs = 1000;
constexpr double kBitsPerByte = 8;
constexpr std::uint64_t kDefaultQuantum = 16384;

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// softverbs' virtual clock. It exists if the ports have a rate and write a trace.
class VirtualClock {
 public:
  explicit VirtualClock(const fs::path& scratch) : scratch_(scratch) {
    if (variable("SOFTVERBS_LINK_GBPS") == nullptr || variable("SOFTVERBS_TRACE") == nullptr) return;
    gbps_ = std::stod(variable("SOFTVERBS_LINK_GBPS"));  // 0: no rate
    trace_ = variable("SOFTVERBS_TRACE");
    const fs::path directory = fs::read_symlink("/proc/self/exe").parent_path();
    const char* const given = variable("SOFTVERBS_CONTROL");
    control_ = given != nullptr ? fs::path(given) : directory / ".." / "softverbs-control" / "softverbs-control";
  }
  explicit operator bool() const { return gbps_ > 0; }

  void hold() { control("hold"); }
  void release() { control("release"); }
  std::size_t lines() const { return count_lines(trace_); }
  std::vector<Quantum> since(std::size_t line) const { return read_trace(trace_, line); }
  double slot_ns() const {
    const char* const quantum = variable("SOFTVERBS_QUANTUM");
    return (quantum != nullptr ? std::stod(quantum) : static_cast<double>(kDefaultQuantum)) * kBitsPerByte / gbps_;
  }

 private:
  void control(const std::string& subcommand) const {
    run_process({control_.string(), subcommand}, {}, scratch_ / (subcommand + ".log"));
  }

  const fs::path scratch_;
  fs::path control_;
  std::string trace_;
  double gbps_ = 0;
};

// A message on each connection of a job.
class Messages {
 public:
  Messages(Job& job, std::size_t bytes) : job_(job), bytes_(bytes), ends_(job.connections().size()) {
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      End& end = ends_[i];
      const JobConnection& connection = job.connections()[i];
      end.source.resize(bytes);
      end.target.resize(bytes);
      std::mt19937_64 content(i);
      for (std::uint8_t& byte : end.source) byte = static_cast<std::uint8_t>(content());
      ranks::require(job.plugin(connection.from)
                         .reg_mr(connection.send, end.source.data(), bytes, nccl::kPtrHost, &end.source_handle),
                     "regMr");
      ranks::require(job.plugin(connection.to)
                         .reg_mr(connection.recv, end.target.data(), bytes, nccl::kPtrHost, &end.target_handle),
                     "regMr");
    }
  }
  ~Messages() {
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      const JobConnection& connection = job_.connections()[i];
      job_.plugin(connection.from).dereg_mr(connection.send, ends_[i].source_handle);
      job_.plugin(connection.to).dereg_mr(connection.recv, ends_[i].target_handle);
    }
  }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Sends one message on each connection, in this order, and returns what was served when: in the clock's time, else in
  // real time. Throws Failure when a byte is wrong.
  std::vector<Service> run(const std::vector<std::size_t>& order, VirtualClock& clock,
                           const std::map<std::uint32_t, std::size_t>& by_qpn) {
    const std::size_t before = clock ? clock.lines() : 0;
    for (End& end : ends_) std::fill(end.target.begin(), end.target.end(), std::uint8_t{0});
    for (std::size_t i = 0; i < ends_.size(); ++i) receive(i);
    std::size_t from = before;
    if (clock) {
      // Each receive sends one quantum, its CTS entry. When the trace has all of them, every sender can send.
      wait([&] { return clock.lines() >= before + ends_.size(); });
      clock.hold();
      from = clock.lines();
    }
    const std::uint64_t start = now();
    for (const std::size_t i : order) send(i);
    if (clock) clock.release();
    wait([&] { return finish(); });
    std::vector<Service> services;
    if (clock) {
      clock.hold();  // a completion can be polled before the trace has its quantum
      for (const Quantum& quantum : clock.since(from)) {
        const auto found = by_qpn.find(quantum.qpn);
        if (found == by_qpn.end()) continue;  // the QP of a receiver
        const JobConnection& connection = job_.connections()[found->second];
        services.push_back({connection.from, connection.to, quantum.ns, quantum.arrival_ns, quantum.bytes});
        services_by_connection_.emplace_back(found->second);
      }
      clock.release();
    } else {
      for (std::size_t i = 0; i < ends_.size(); ++i) {
        const JobConnection& connection = job_.connections()[i];
        services.push_back({connection.from, connection.to, start, ends_[i].arrival, bytes_});
      }
    }
    for (const End& end : ends_) {
      if (end.source != end.target)
        throw ranks::Failure("a message arrived with other bytes", ranks::ExitStatus::kWrong);
    }
    return services;
  }

  // The time at which the message of each connection was first served.
  std::vector<double> first_service(const std::vector<Service>& services) {
    std::vector<double> first(ends_.size(), -1);
    const std::vector<std::size_t> connections = std::exchange(services_by_connection_, {});
    for (std::size_t i = 0; i < services.size(); ++i) {
      const std::size_t connection = connections.empty() ? i : connections[i];
      const auto when = static_cast<double>(connections.empty() ? ends_[i].sent : services[i].begin);
      if (first[connection] < 0 || when < first[connection]) first[connection] = when;
    }
    return first;
  }

 private:
  struct End {
    std::vector<std::uint8_t> source;
    std::vector<std::uint8_t> target;
    void* source_handle = nullptr;
    void* target_handle = nullptr;
    void* send = nullptr;
    void* recv = nullptr;
    std::uint64_t sent = 0;
    std::uint64_t arrival = 0;
  };

  static std::uint64_t now() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

  template <typename Done>
  static void wait(Done done) {
    const auto end = std::chrono::steady_clock::now() + kRunTimeout;
    while (!done()) {
      if (std::chrono::steady_clock::now() > end)
        throw ranks::Failure("messages did not arrive", ranks::ExitStatus::kTimeout);
    }
  }

  void receive(std::size_t i) {
    End& end = ends_[i];
    const JobConnection& connection = job_.connections()[i];
    void* data = end.target.data();
    std::size_t bytes = bytes_;
    int tag = 0;
    wait([&] {
      end.recv = nullptr;
      ranks::require(
          job_.plugin(connection.to).irecv(connection.recv, 1, &data, &bytes, &tag, &end.target_handle, &end.recv),
          "irecv");
      return end.recv != nullptr;
    });
  }

  void send(std::size_t i) {
    End& end = ends_[i];
    const JobConnection& connection = job_.connections()[i];
    wait([&] {
      ranks::require(job_.plugin(connection.from)
                         .isend(connection.send, end.source.data(), bytes_, 0, end.source_handle, &end.send),
                     "isend");
      return end.send != nullptr;
    });
  }

  // Tests every outstanding request once. Returns whether all are done.
  bool finish() {
    bool all = true;
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      End& end = ends_[i];
      const JobConnection& connection = job_.connections()[i];
      for (auto [request, when, rank] :
           {std::tuple(&end.send, &end.sent, connection.from), std::tuple(&end.recv, &end.arrival, connection.to)}) {
        if (*request == nullptr) continue;
        int done = 0;
        int size = 0;
        ranks::require(job_.plugin(rank).test(*request, &done, &size), "test");
        if (done == 0) {
          all = false;
          continue;
        }
        *when = now();
        *request = nullptr;
      }
    }
    return all;
  }

  Job& job_;
  const std::size_t bytes_;
  std::vector<End> ends_;
  std::vector<std::size_t> services_by_connection_;
};

// Index of the connection that a send QP belongs to.
std::map<std::uint32_t, std::size_t> connections_by_qpn(Job& job, const std::vector<DumpedQp>& dump) {
  std::map<std::tuple<std::string, std::string, std::uint32_t>, std::size_t> by_ends;
  for (std::size_t i = 0; i < job.connections().size(); ++i) {
    const JobConnection& connection = job.connections()[i];
    by_ends[{job.identity(connection.from), job.identity(connection.to), static_cast<std::uint32_t>(connection.flow)}] =
        i;
  }
  std::map<std::uint32_t, std::size_t> by_qpn;
  for (const DumpedQp& qp : dump) {
    if (qp.side == "send") by_qpn[qp.qpn] = by_ends.at({qp.self, qp.peer, qp.connection});
  }
  return by_qpn;
}

Json premise(const QpOrderOptions& options, Job& job, Messages& messages, VirtualClock& clock,
             const std::map<std::uint32_t, std::size_t>& by_qpn) {
  std::vector<double> numbers(job.connections().size());
  for (const auto& [qpn, connection] : by_qpn) numbers[connection] = qpn;
  std::vector<std::size_t> order(job.connections().size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(options.seed);
  double with_number = 0;
  double with_doorbell = 0;
  for (int round = 0; round < options.rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    std::vector<double> doorbells(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) doorbells[order[i]] = static_cast<double>(i);
    const std::vector<double> service = messages.first_service(messages.run(order, clock, by_qpn));
    with_number += rank_correlation(service, numbers) / options.rounds;
    with_doorbell += rank_correlation(service, doorbells) / options.rounds;
  }
  return {{"qps", order.size()}, {"rounds", options.rounds}, {"qp_number", with_number}, {"doorbell", with_doorbell}};
}

Json figures(const QpOrderOptions& options, Job& job, Messages& messages, VirtualClock& clock,
             const std::map<std::uint32_t, std::size_t>& by_qpn, const std::vector<DumpedQp>& dump) {
  std::vector<std::size_t> order(job.connections().size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const std::vector<Service> services = messages.run(order, clock, by_qpn);
  const OrderFigures found = figures_of(services, clock ? clock.slot_ns() : kNsPerUs);
  std::map<std::string, int> ranks;
  for (int rank = 0; rank < options.ranks; ++rank) ranks[job.identity(rank)] = rank;
  const Placement placement = place_by_number(dump, ranks);
  std::uint64_t bytes = 0;
  for (const Service& service : services) bytes += service.bytes;
  return {{"connections", order.size()},
          {"bytes", bytes},
          {"qps", placement.qps},
          {"exact", placement.exact},
          {"inversions", placement.inversions},
          {"first_max", found.first_max},
          {"first_mean", found.first_mean},
          {"jain", found.jain},
          {"senders", clock ? Json(found.senders) : Json(nullptr)}};
}

}  // namespace

ranks::ExitStatus measure(const QpOrderOptions& options) {
  ranks::keep_plugin_log(0, options.plugin_log);
  const fs::path scratch = fs::path(options.result).parent_path();
  VirtualClock clock(scratch);
  const bool is_premise = options.part == kPremisePart;
  const JobShape shape{.ranks = options.ranks,
                       .flows = is_premise ? 1 : options.flows,
                       .rotate = options.rotate,
                       .only_from_first = is_premise};
  try {
    Job job(options.plugin, options.api_version, shape, scratch.string());
    job.connect();
    const std::vector<DumpedQp> dump = read_dump(variable("VERBATIM_QP_DUMP"));
    const std::map<std::uint32_t, std::size_t> by_qpn = connections_by_qpn(job, dump);
    Json result;
    {
      Messages messages(job, options.bytes);
      result = is_premise ? premise(options, job, messages, clock, by_qpn)
                          : figures(options, job, messages, clock, by_qpn, dump);
    }
    result["api_version"] = job.api_version();
    result["virtual_clock"] = static_cast<bool>(clock);
    netapi::Properties properties;
    ranks::require(job.plugin(0).properties(0, &properties), "getProperties");
    result["device"] = netapi::verbs_name(properties);
    job.close();
    std::ofstream(options.result) << result.dump() << "\n";
  } catch (const ranks::Failure& failure) {
    throw ranks::Failure(failure.what() + ranks::plugin_warnings(), failure.status);
  }
  return ranks::ExitStatus::kOk;
}

}  // namespace verbatim::perf::qp_order
