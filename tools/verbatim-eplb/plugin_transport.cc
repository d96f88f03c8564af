// Runs operations over a net plugin's table, in host or GPU memory, as NCCL's progress thread does: it posts what can
// be posted and tests the oldest request of each connection, in a loop.
#include <sched.h>

#include <algorithm>
#include <climits>
#include <deque>
#include <optional>

#include "netapi/plugin.h"
#include "ranks/failure.h"
#include "ranks/loaded_plugin.h"
#include "ranks/plugin_log.h"
#include "ranks/worker_thread.h"
#include "verbatim-eplb/transport.h"

namespace verbatim::eplb {
namespace {

using ranks::Connection;
using ranks::Failure;
using ranks::require;

// The value of *request before isend. NCCL does not clear the variable, so the plugin must write it.
char unwritten_request;

struct Message {
  const Part* part;
  std::size_t offset;
  std::size_t bytes;
  int tag;
  std::size_t operation;
};

// One direction of a connection, with the messages of a group. A step is one send, or one receive of one or more
// messages.
struct Lane {
  const Connection* connection = nullptr;
  std::vector<Message> messages = {};
  struct Step {
    std::size_t first;
    int count;
    bool ends_operation;
  };
  std::vector<Step> steps = {};
  std::size_t started = 0;
  std::size_t transferred = 0;  // the send or receive is done; the flush of a receive may be outstanding
  std::size_t completed = 0;
  // Of the steps from `completed` to `started` - 1: the send or receive, later its flush (null: none); index: step
  // modulo their number.
  std::vector<void*> requests = {};
};

class PluginTransport final : public Transport {
 public:
  PluginTransport(const Options& options, ranks::CoordinatorConnection& coordinator, Watchdog& watchdog)
      : options_(options),
        coordinator_(coordinator),
        watchdog_(watchdog),
        memory_(memory::make_memory(options.memory, options.cuda, options.job.rank, options.pages)),
        plugin_(options.plugin, options.api_version, coordinator.comm_id()) {
    memory::require_support(*memory_, plugin_);
    const auto ranks = static_cast<std::size_t>(options.job.nranks);
    counters_.sent.resize(ranks);
    counters_.received.resize(ranks);
    struct Limits {
      int group;
      std::size_t bytes;
    };
    // Both ends must divide an expert into the same messages.
    Limits common{std::min(plugin_.max_recvs(), netapi::kMaxGroup), plugin_.max_p2p_bytes()};
    for (const Limits& other : coordinator.all_gather_values(common)) {
      common.group = std::min(common.group, other.group);
      common.bytes = std::min(common.bytes, other.bytes);
    }
    const bool direct = options.mode == Mode::kDirect;
    group_ = direct ? std::max(1, common.group) : 1;
    chunk_bytes_ = direct || options.chunk_bytes == 0 ? common.bytes : std::min(common.bytes, options.chunk_bytes);
  }

  memory::Memory& memory() override { return *memory_; }

  void connect(const std::set<std::pair<int, int>>& pairs, const std::vector<ranks::Piece>& pieces) override {
    std::vector<ranks::Flow> flows;
    for (const auto& [source, destination] : pairs) flows.push_back({source, destination, 0});
    connections_.emplace(*plugin_, plugin_.context(), static_cast<int>(plugin_.devices().size()), flows,
                         options_.job.rank);
    std::vector<ranks::Handle> own;
    service_.run([&] { own = connections_->listen(); });
    std::vector<ranks::Handle> handles = ranks::exchange_handles(coordinator_, flows, own);
    service_.run([&] {
      connections_->establish(handles);
      connections_->register_memory(pieces, [this](const Connection& connection, const ranks::Piece& piece) {
        return memory_->register_at(plugin_, connection.device, connection.comm, piece.data, piece.bytes);
      });
    });
    const auto ranks = static_cast<std::size_t>(options_.job.nranks);
    lanes_.assign(2 * ranks, {});
    for (const Connection& connection : connections_->all()) {
      lane(connection.sends, connection.sends ? connection.flow.destination : connection.flow.source).connection =
          &connection;
    }
  }

  void run_group(std::span<const Operation> operations, std::size_t first) override {
    first_ = first;
    for (Lane& lane : lanes_) {
      lane.messages.clear();
      lane.steps.clear();
      lane.started = lane.transferred = lane.completed = 0;
    }
    for (std::size_t i = 0; i < operations.size(); ++i) add(operations[i], i);
    for (Lane& lane : lanes_) {
      lane.requests.resize(static_cast<std::size_t>(options_.depth) * static_cast<std::size_t>(group_));
    }
    for (;;) {
      bool all = true;
      bool progressed = false;
      for (Lane& lane : lanes_) {
        if (lane.steps.empty()) continue;
        progressed = start_steps(lane) || progressed;
        progressed = complete_steps(lane, operations) || progressed;
        all = all && lane.completed == lane.steps.size();
      }
      if (all) return;
      if (progressed) {
        watchdog_.progress();
      } else {
        sched_yield();
      }
    }
  }

  void finish() override {}

  void close() override {
    if (connections_) service_.run([this] { connections_->close(); });
    plugin_.finalize();
  }

  ranks::Json describe() const override {
    ranks::Json json{{"over", "plugin"},
                     {"path", options_.plugin},
                     {"name", plugin_->name()},
                     {"api_version", plugin_->api_version()},
                     {"members_of_a_receive", group_},
                     {"chunk_bytes", chunk_bytes_},
                     {"memory", memory_->describe()},
                     {"registered_by", memory_->registered_by(plugin_, 0)},
                     {"devices", ranks::Json::array()}};
    for (const netapi::Properties& device : plugin_.devices()) json["devices"].push_back(ranks::json_of(device));
    return json;
  }

 private:
  Lane& lane(bool sends, int peer) { return lanes_[2 * static_cast<std::size_t>(peer) + (sends ? 1 : 0)]; }

  // Divides parts into messages of at most chunk_bytes_. A receive has up to group_ messages of one operation. An empty
  // part is one empty message. The tag is the member's index in its receive.
  void add(const Operation& operation, std::size_t index) {
    Lane& on = lane(operation.sends, operation.peer);
    if (on.connection == nullptr) throw Failure("no connection to " + operation.to_string());
    const std::size_t first = on.messages.size();
    for (const Part& part : operation.parts) {
      std::size_t offset = 0;
      do {
        const std::size_t bytes = std::min(chunk_bytes_, part.bytes - offset);
        const auto member = static_cast<int>((on.messages.size() - first) % static_cast<std::size_t>(group_));
        on.messages.push_back({&part, offset, bytes, member, index});
        offset += bytes;
      } while (offset < part.bytes);
    }
    const std::size_t step = operation.sends ? 1 : static_cast<std::size_t>(group_);
    for (std::size_t at = first; at < on.messages.size(); at += step) {
      const std::size_t count = std::min(step, on.messages.size() - at);
      on.steps.push_back({at, static_cast<int>(count), at + count == on.messages.size()});
    }
  }

  bool start_steps(Lane& lane) {
    const bool sends = lane.connection->sends;
    const std::size_t window = sends ? lane.requests.size() : static_cast<std::size_t>(options_.depth);
    bool progressed = false;
    while (lane.started < lane.steps.size() && lane.started - lane.completed < window) {
      void*& request = lane.requests[lane.started % lane.requests.size()];
      const Lane::Step& step = lane.steps[lane.started];
      if (sends ? !start_send(lane, step, request) : !start_receive(lane, step, request)) break;
      ++lane.started;
      progressed = true;
    }
    return progressed;
  }

  bool start_send(const Lane& lane, const Lane::Step& step, void*& request) {
    const Connection& connection = *lane.connection;
    const Message& message = lane.messages[step.first];
    request = &unwritten_request;
    require(plugin_->isend(connection.comm, message.part->data + message.offset, message.bytes, message.tag,
                           connection.mhandles[message.part->piece], &request),
            "isend (" + connection.to_string() + ")");
    if (request == &unwritten_request) throw Failure("isend returned success without writing *request");
    return request != nullptr;
  }

  bool start_receive(const Lane& lane, const Lane::Step& step, void*& request) {
    const Connection& connection = *lane.connection;
    void* data[netapi::kMaxGroup];
    void* mhandles[netapi::kMaxGroup];
    std::size_t sizes[netapi::kMaxGroup];
    int tags[netapi::kMaxGroup];
    for (int i = 0; i < step.count; ++i) {
      const Message& message = lane.messages[step.first + static_cast<std::size_t>(i)];
      data[i] = message.part->data + message.offset;
      mhandles[i] = connection.mhandles[message.part->piece];
      sizes[i] = message.bytes;
      tags[i] = message.tag;
    }
    request = nullptr;
    require(plugin_->irecv(connection.comm, step.count, data, sizes, tags, mhandles, &request),
            "irecv (" + connection.to_string() + ")");
    return request != nullptr;
  }

  bool complete_steps(Lane& lane, std::span<const Operation> operations) {
    bool progressed = false;
    for (; lane.transferred < lane.started; ++lane.transferred) {
      const Lane::Step& step = lane.steps[lane.transferred];
      void*& request = lane.requests[lane.transferred % lane.requests.size()];
      int sizes[netapi::kMaxGroup];
      std::fill_n(sizes, step.count, -1);
      if (!test(lane, request, sizes)) break;
      count(lane, step, sizes, operations);
      request = start_flush(lane, step, sizes);
      progressed = true;
    }
    for (; lane.completed < lane.transferred; ++lane.completed) {
      void* const flush = lane.requests[lane.completed % lane.requests.size()];
      if (flush != nullptr && !test(lane, flush, nullptr)) break;
      const Lane::Step& step = lane.steps[lane.completed];
      progressed = true;
      if (!step.ends_operation) continue;
      ++counters_.operations;
      watchdog_.done(first_ + lane.messages[step.first].operation);
    }
    return progressed;
  }

  bool test(const Lane& lane, void* request, int* sizes) {
    int done = 0;
    require(plugin_->test(request, &done, sizes), "test (" + lane.connection->to_string() + ")");
    return done != 0;
  }

  // Returns the request of the flush that a receive into GPU memory needs before its data may be read.
  void* start_flush(const Lane& lane, const Lane::Step& step, int* sizes) {
    const Connection& connection = *lane.connection;
    if (connection.sends || memory_->is_host()) return nullptr;
    void* data[netapi::kMaxGroup];
    void* mhandles[netapi::kMaxGroup];
    for (int i = 0; i < step.count; ++i) {
      const Message& message = lane.messages[step.first + static_cast<std::size_t>(i)];
      data[i] = message.part->data + message.offset;
      mhandles[i] = connection.mhandles[message.part->piece];
    }
    void* request = nullptr;
    require(plugin_->iflush(connection.comm, step.count, data, sizes, mhandles, &request),
            "iflush (" + connection.to_string() + ")");
    return request;
  }

  void count(const Lane& lane, const Lane::Step& step, const int* sizes, std::span<const Operation> operations) {
    const bool sends = lane.connection->sends;
    const std::size_t operation = lane.messages[step.first].operation;
    const auto peer = static_cast<std::size_t>(operations[operation].peer);
    for (int i = 0; i < step.count; ++i) {
      const Message& message = lane.messages[step.first + static_cast<std::size_t>(i)];
      const auto expected = static_cast<int>(std::min<std::size_t>(message.bytes, INT_MAX));
      if (!sends && sizes[i] != expected) {
        throw Failure("test reported " + std::to_string(sizes[i]) + " bytes instead of " + std::to_string(expected) +
                      " for member " + std::to_string(i) + " of " + operations[operation].to_string());
      }
      (sends ? counters_.sent : counters_.received)[peer] += message.bytes;
    }
    ++counters_.messages;
    if (!sends && step.count > 1) ++counters_.grouped_receives;
  }

  const Options& options_;
  ranks::CoordinatorConnection& coordinator_;
  Watchdog& watchdog_;
  const std::unique_ptr<memory::Memory> memory_;  // before the plugin: see make_memory()
  ranks::LoadedPlugin plugin_;
  int group_ = 1;
  std::size_t chunk_bytes_ = 0;
  std::optional<ranks::Connections> connections_;
  std::vector<Lane> lanes_;
  std::size_t first_ = 0;
  ranks::Worker service_{"service"};
};

}  // namespace

std::unique_ptr<Transport> make_plugin_transport(const Options& options, ranks::CoordinatorConnection& coordinator,
                                                 Watchdog& watchdog) {
  ranks::keep_plugin_log(options.job.rank, options.plugin_log);
  return std::make_unique<PluginTransport>(options, coordinator, watchdog);
}

}  // namespace verbatim::eplb
