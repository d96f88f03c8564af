#include "verbatim-perf/rank.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "netapi/plugin.h"
#include "traffic/guarded_buffer.h"
#include "verbatim-perf/connections.h"
#include "verbatim-perf/hub.h"
#include "verbatim-perf/launcher.h"
#include "verbatim-perf/link.h"
#include "verbatim-perf/operation.h"
#include "verbatim-perf/plugin_log.h"
#include "verbatim-perf/progress.h"
#include "verbatim-perf/progress_bar.h"
#include "verbatim-perf/report.h"
#include "verbatim-perf/worker.h"

namespace verbatim::perf {
namespace {

using traffic::GuardedBuffer;

constexpr int kDefaultGroup = 8;
constexpr std::size_t kMaxElementBytes = 8;
constexpr int kComplaints = 3;  // wrong places that a rank describes; the table counts all
constexpr std::chrono::milliseconds kBarInterval{100};

// What ranks tell each other before they connect.
struct Introduction {
  char host[64];
  int pid;
  int api_version;
  int max_recvs;
  std::size_t max_p2p_bytes;
};

// What ranks tell each other after each size.
struct Outcome {
  std::uint64_t elapsed_ns;
  std::uint64_t wrong;
};

template <typename T>
std::string to_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename T>
T from_bytes(const std::string& bytes) {
  T value{};
  if (bytes.size() != sizeof value) throw Failure("the ranks are not of the same build");
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// A loaded plugin and one communicator's context in it.
class LoadedPlugin {
 public:
  explicit LoadedPlugin(const Options& options) {
    netapi::Opened opened = netapi::open_plugin(options.plugin, options.api_version);
    if (!opened.plugin) throw Failure(opened.error);
    plugin_ = std::move(opened.plugin);
    require(plugin_->init(options.token, {}, &context_), "init");
    int devices = 0;
    require(plugin_->devices(&devices), "devices");
    if (devices <= 0) throw Failure("the plugin has no device");
    for (int device = 0; device < devices; ++device) {
      require(plugin_->properties(device, &devices_.emplace_back()), "getProperties");
    }
  }
  void finalize() { require(plugin_->finalize(context_), "finalize"); }

  netapi::Plugin& operator*() const { return *plugin_; }
  netapi::Plugin* operator->() const { return plugin_.get(); }
  void* context() const { return context_; }
  const std::vector<netapi::Properties>& devices() const { return devices_; }

 private:
  std::unique_ptr<netapi::Plugin> plugin_;
  void* context_ = nullptr;
  std::vector<netapi::Properties> devices_;
};

class Rank {
 public:
  Rank(const Options& options, Link& link) : options_(options), link_(link), plugin_(options) {}

  ExitStatus run() {
    introduce();
    connect();
    if (is_first()) print_header(stdout, report_);
    for (const std::size_t bytes : sizes_) measure(bytes);
    service_.run([this] { connections_->close(); });
    plugin_.finalize();
    if (is_first()) {
      print_footer(stdout, report_);
      if (!options_.json.empty()) write_json(report_, options_.json);
    }
    return report_.wrong() == 0 ? ExitStatus::kOk : ExitStatus::kWrong;
  }

 private:
  bool is_first() const { return options_.rank == 0; }

  // Agrees with the other ranks on what all of their plugins can do.
  void introduce() {
    Introduction own{};
    gethostname(own.host, sizeof own.host - 1);
    own.pid = getpid();
    own.api_version = plugin_->api_version();
    own.max_recvs = kDefaultGroup;
    own.max_p2p_bytes = netapi::kMaxBytesBeforeV9 << 10;
    for (const netapi::Properties& device : plugin_.devices()) {
      own.max_recvs = std::min(own.max_recvs, device.max_recvs);
      own.max_p2p_bytes = std::min(own.max_p2p_bytes, device.max_p2p_bytes);
    }
    if (options_.group > 0) own.max_recvs = options_.group;

    Introduction common = own;
    report_ = {.options = options_,
               .plugin_name = plugin_->name(),
               .api_version = plugin_->api_version(),
               .devices = plugin_.devices(),
               .ranks = {},
               .rows = {}};
    for (const std::string& bytes : link_.all_gather(to_bytes(own))) {
      const auto other = from_bytes<Introduction>(bytes);
      if (other.api_version != own.api_version) {
        throw Failure("this rank's plugin speaks v" + std::to_string(own.api_version) + ", that of another v" +
                      std::to_string(other.api_version) + ": say --api");
      }
      report_.ranks.push_back({other.host, other.pid});
      common.max_recvs = std::min(common.max_recvs, other.max_recvs);
      common.max_p2p_bytes = std::min(common.max_p2p_bytes, other.max_p2p_bytes);
    }
    report_.group = static_cast<std::size_t>(std::max(1, common.max_recvs));
    report_.chunk_bytes = chunk_bytes(common.max_p2p_bytes);
    operation_ = make_operation(options_.operation, {.rank = options_.rank,
                                                     .ranks = options_.nranks,
                                                     .channels = options_.channels,
                                                     .type = options_.type,
                                                     .chunk_bytes = report_.chunk_bytes,
                                                     .depth = static_cast<std::size_t>(options_.depth),
                                                     .group = report_.group});
  }

  // No larger than the largest size, or staging would need as much memory as the largest possible chunk.
  std::size_t chunk_bytes(std::size_t max_p2p_bytes) const {
    const std::size_t wanted =
        options_.chunk_bytes > 0 ? options_.chunk_bytes : default_chunk_bytes(options_.operation);
    const std::size_t useful = std::min({wanted, max_p2p_bytes, options_.max_bytes + kMaxElementBytes});
    return std::max(useful / kMaxElementBytes * kMaxElementBytes, kMaxElementBytes);
  }

  void connect() {
    const Extent largest = operation_->extent(options_.max_bytes);
    const std::size_t needed[kBuffers] = {largest.send_bytes, largest.recv_bytes, operation_->staging_bytes()};
    Memory memory;
    for (std::size_t i = 0; i < kBuffers; ++i) {
      buffers_[i] = std::make_unique<GuardedBuffer>(needed[i]);
      memory.buffers[i] = {buffers_[i]->data(), buffers_[i]->capacity()};
    }
    const std::vector<Flow> flows = operation_->flows();
    connections_.emplace(*plugin_, plugin_.context(), static_cast<int>(plugin_.devices().size()), flows, options_.rank);
    std::vector<Handle> own;
    service_.run([&] { own = connections_->listen(); });
    std::vector<Handle> handles = exchange(flows, own);
    service_.run([&] {
      connections_->establish(handles);
      connections_->register_memory(memory);
    });
    progress_.emplace(*plugin_, *connections_, memory, options_.type, options_.pause_us);
  }

  // One handle for each flow, from the rank that receives it.
  std::vector<Handle> exchange(const std::vector<Flow>& flows, const std::vector<Handle>& own) {
    std::string bytes;
    for (const Handle& handle : own) bytes.append(handle.data(), handle.size());
    const std::vector<std::string> all = link_.all_gather(bytes);
    std::vector<std::size_t> taken(all.size());
    std::vector<Handle> handles(flows.size());
    for (std::size_t i = 0; i < flows.size(); ++i) {
      const auto from = static_cast<std::size_t>(flows[i].destination);
      if (all[from].size() < taken[from] + sizeof(Handle)) throw Failure("the ranks differ in their options");
      std::memcpy(handles[i].data(), all[from].data() + taken[from], sizeof(Handle));
      taken[from] += sizeof(Handle);
    }
    return handles;
  }

  void measure(std::size_t bytes) {
    const Extent extent = operation_->extent(bytes);
    progress_->prepare(operation_->plan(extent));
    Outcome own{};
    for (int i = 0; i < options_.check_iterations; ++i) {
      fill(extent);
      iterate(1, bytes);
      own.wrong += check(extent);
    }
    fill(extent);
    link_.barrier();
    iterate(options_.warmup_iterations, bytes);  // also brings the ranks into step
    const std::uint64_t begin = monotonic_ns();
    iterate(options_.iterations, bytes);
    own.elapsed_ns = monotonic_ns() - begin;
    if (options_.check_iterations > 0) own.wrong += check(extent);
    add_row(extent, own);
  }

  void add_row(const Extent& extent, const Outcome& own) {
    std::uint64_t slowest_ns = 1;
    Row row{.bytes = extent.bytes, .count = extent.count};
    for (const std::string& bytes : link_.all_gather(to_bytes(own))) {
      const auto outcome = from_bytes<Outcome>(bytes);
      slowest_ns = std::max(slowest_ns, outcome.elapsed_ns);
      row.wrong += outcome.wrong;
    }
    const double ns = static_cast<double>(slowest_ns) / options_.iterations * operation_->time_factor();
    row.time_us = ns / 1000;
    row.algbw = static_cast<double>(extent.bytes) / ns;
    row.busbw = row.algbw * operation_->bus_factor();
    report_.rows.push_back(row);
    bar_.clear();
    if (is_first()) print_row(stdout, report_, row);
  }

  // New content for a new step, and the complement of what is to come where it is to come.
  void fill(const Extent& extent) {
    ++step_;
    if (options_.check_iterations == 0 && step_ > 1) return;
    buffer(Buffer::kSend).resize(extent.send_bytes);
    buffer(Buffer::kRecv).resize(extent.recv_bytes);
    traffic::fill(own_content(), buffer(Buffer::kSend).data(), extent.send_bytes);
    for (const Expected& expected : operation_->expected(extent, step_)) {
      traffic::poison(*expected.content, buffer(Buffer::kRecv).data() + expected.offset, expected.bytes,
                      expected.content_offset);
    }
  }

  // Elements (or, in guards, bytes) that are wrong on this rank.
  std::uint64_t check(const Extent& extent) {
    const std::size_t unit = traffic::element_bytes(options_.type);
    std::uint64_t wrong = 0;
    for (const Expected& expected : operation_->expected(extent, step_)) {
      const traffic::Mismatch found = traffic::verify(*expected.content, buffer(Buffer::kRecv).data() + expected.offset,
                                                      expected.bytes, expected.content_offset, unit);
      wrong += describe("receive", expected.offset, found);
    }
    wrong +=
        describe("send", 0, traffic::verify(own_content(), buffer(Buffer::kSend).data(), extent.send_bytes, 0, unit));
    for (const auto& guarded : buffers_) {
      const auto damage = guarded->damage();
      if (!damage) continue;
      wrong += damage->bytes;
      complain("wrote outside of a buffer of " + std::to_string(guarded->size()) + " bytes, at offset " +
               std::to_string(damage->offset));
    }
    return wrong;
  }

  std::uint64_t describe(const char* which, std::size_t offset, const traffic::Mismatch& found) {
    if (found.wrong == 0) return 0;
    char text[160];
    std::snprintf(text, sizeof text,
                  "%" PRIu64 " wrong elements in the %s buffer, first at byte %zu: %02x in place of %02x", found.wrong,
                  which, offset + static_cast<std::size_t>(found.first_offset), found.got, found.expected);
    complain(text);
    return found.wrong;
  }

  void complain(const std::string& what) {
    if (complaints_++ >= kComplaints) return;
    bar_.clear();
    std::fprintf(stderr, "verbatim-perf: rank %d, iteration %" PRIu64 ": %s\n", options_.rank, step_, what.c_str());
  }

  void iterate(int iterations, std::size_t bytes) {
    std::atomic<std::uint64_t> finished{0};
    std::future<void> done = progress_thread_.start(
        [&] { progress_->run(static_cast<std::uint64_t>(iterations), operation_->overlaps(), finished); });
    while (done.wait_for(kBarInterval) != std::future_status::ready) {
      const double part = static_cast<double>(finished.load(std::memory_order_relaxed)) / iterations;
      const auto size = static_cast<double>(report_.rows.size());
      bar_.draw((size + part) / static_cast<double>(sizes_.size()), std::to_string(bytes) + " B");
    }
    done.get();
  }

  traffic::Elements own_content() const { return {options_.type, static_cast<std::uint64_t>(options_.rank), step_}; }
  GuardedBuffer& buffer(Buffer which) { return *buffers_[static_cast<std::size_t>(which)]; }

  const Options options_;
  Link& link_;
  LoadedPlugin plugin_;
  const std::vector<std::size_t> sizes_ = message_sizes(options_);
  std::unique_ptr<Operation> operation_;
  std::unique_ptr<GuardedBuffer> buffers_[kBuffers];
  std::optional<Connections> connections_;
  std::optional<Progress> progress_;
  ProgressBar bar_{options_.rank == 0};
  Report report_;
  std::uint64_t step_ = 0;
  int complaints_ = 0;
  Worker service_{"service"};
  Worker progress_thread_{"progress"};
};

// Between hosts: the hub of rank 0, in a thread. The job's end is heard through the link.
class OwnHub {
 public:
  explicit OwnHub(const Options& options)
      : hub_(listen_for_ranks(port_of(options.root)), options.nranks, options.token, options.timeout_s),
        thread_([this] { hub_.serve([] { return std::nullopt; }); }) {}
  ~OwnHub() { thread_.join(); }
  OwnHub(const OwnHub&) = delete;
  OwnHub& operator=(const OwnHub&) = delete;

 private:
  Hub hub_;
  std::thread thread_;
};

}  // namespace

ExitStatus run_rank(const Options& options) {
  std::optional<OwnHub> hub;
  if (options.rank == 0 && !options.child) hub.emplace(options);
  const Hello hello{options.token, static_cast<std::uint32_t>(options.rank),
                    static_cast<std::uint32_t>(options.nranks)};
  Link link(options.root, hello, options.timeout_s);
  keep_plugin_log(options.rank, options.verbose);
  std::optional<Rank> rank;  // outlives the handlers: a failure is told before the plugin says good-bye to its peers
  try {
    const ExitStatus status = rank.emplace(options, link).run();
    rank.reset();
    link.bye();
    return status;
  } catch (const Failure& failure) {
    link.fail(failure.status, failure.what() + plugin_warnings());
  } catch (const std::exception& failure) {
    link.fail(ExitStatus::kFailed, failure.what() + plugin_warnings());
  }
}

}  // namespace verbatim::perf
