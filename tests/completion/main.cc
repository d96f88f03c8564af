// The program `completion` sends many messages over connections within one process. All bytes and sizes must be right,
// and the totals in the plugin's statistics (VERBATIM_STATS) must equal those of the program.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "netapi/log.h"
#include "netapi/plugin.h"
#include "traffic.h"

namespace verbatim::completion {
namespace {

using Json = nlohmann::json;

constexpr auto kRunTimeout = std::chrono::seconds(30);

struct Options {
  std::string plugin;
  int api = 0;
  PlanOptions plan;
  std::uint64_t members = 8;      // maximum of a group; the plugin's maxRecvs can be lower
  std::uint64_t connections = 1;  // one after the other; the messages are divided among them
  // When set, each end has its own context with this VERBATIM_COMPLETION.
  std::string send_completion;
  std::string recv_completion;
  std::string expect_completion;       // imm or atomic: the mode that all connections must use
  std::uint64_t expect_fallbacks = 0;  // number of warnings that atomics are not used
  bool expect_wrong = false;           // the exit status is 0 only if bytes of messages are wrong
};

Options parse(int argc, char** argv) {
  Options options;
  const std::map<std::string, std::uint64_t*> numbers{{"--messages", &options.plan.messages},
                                                      {"--seed", &options.plan.seed},
                                                      {"--large-every", &options.plan.large_every},
                                                      {"--connections", &options.connections},
                                                      {"--members", &options.members},
                                                      {"--expect-fallbacks", &options.expect_fallbacks}};
  const std::map<std::string, std::string*> texts{{"--plugin", &options.plugin},
                                                  {"--send-completion", &options.send_completion},
                                                  {"--recv-completion", &options.recv_completion},
                                                  {"--expect-completion", &options.expect_completion}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--optional") {
      options.plan.optional = true;
    } else if (name == "--expect-wrong") {
      options.expect_wrong = true;
    } else if (++i == argc) {
      throw Failure(name + " needs a value");
    } else if (name == "--api") {
      options.api = std::stoi(argv[i]);
    } else if (const auto number = numbers.find(name); number != numbers.end()) {
      *number->second = std::stoull(argv[i]);
    } else if (const auto text = texts.find(name); text != texts.end()) {
      *text->second = argv[i];
    } else {
      throw Failure("unknown option " + name);
    }
  }
  if (options.plugin.empty()) throw Failure("--plugin is missing");
  return options;
}

// Counts the warnings that atomics are not used, and all others, which are failures.
struct Warnings {
  std::uint64_t fallbacks = 0;
  std::uint64_t others = 0;

  void count(const netapi::LogLine& line) {
    if (line.level != nccl::DebugLogLevel::kWarn) return;
    std::printf("warning: %s\n", line.text.c_str());
    ++(line.text.find("VERBATIM_COMPLETION=atomic is not used") != std::string::npos ? fallbacks : others);
  }
};

struct Contexts {
  void* send = nullptr;
  void* recv = nullptr;
};

Contexts make_contexts(netapi::Plugin& plugin, const Options& options) {
  Contexts contexts;
  const bool two = !options.send_completion.empty();
  if (two) ::setenv("VERBATIM_COMPLETION", options.send_completion.c_str(), 1);
  require(plugin.init(1, {}, &contexts.send), "init");
  contexts.recv = contexts.send;
  if (!two) return contexts;
  ::setenv("VERBATIM_COMPLETION", options.recv_completion.c_str(), 1);
  require(plugin.init(1, {}, &contexts.recv), "init");
  if (contexts.recv == contexts.send) throw Failure("two contexts need a table from v11 on");
  return contexts;
}

void run_connection(netapi::Plugin& plugin, const Contexts& contexts, const PlanOptions& plan, Totals& totals) {
  alignas(16) std::array<char, nccl::kNetHandleMaxBytes> handle{};
  void* listen = nullptr;
  void* send = nullptr;
  void* recv = nullptr;
  require(plugin.listen(contexts.recv, 0, handle.data(), &listen), "listen");
  const auto end = std::chrono::steady_clock::now() + kRunTimeout;
  while (send == nullptr || recv == nullptr) {
    if (send == nullptr) require(plugin.connect(contexts.send, 0, handle.data(), &send), "connect");
    if (recv == nullptr) require(plugin.accept(listen, &recv), "accept");
    if (std::chrono::steady_clock::now() > end) throw Failure("a connection was not established in time");
  }
  require(plugin.close_listen(listen), "closeListen");
  Traffic(plugin, send, recv, plan, totals).run();
  require(plugin.close_send(send), "closeSend");
  require(plugin.close_recv(recv), "closeRecv");
}

void expect(const char* what, const Json& found, const Json& wanted) {
  if (found != wanted) throw Failure(std::string(what) + " is " + found.dump() + ", not " + wanted.dump());
}

void check_stats(const std::string& path, const Options& options, const Totals& totals) {
  std::ifstream file(path);
  if (!file) throw Failure("the plugin has not written " + path);
  const Json stats = Json::parse(file);
  const Json& send = stats["totals"]["send"];
  const Json& recv = stats["totals"]["recv"];
  expect("the count of send connections", send["connections"], options.connections);
  expect("the count of receive connections", recv["connections"], options.connections);
  expect("the count of messages sent", send["messages"], totals.messages);
  expect("the count of messages received", recv["messages"], totals.messages);
  expect("the sum of bytes sent", send["bytes"], totals.bytes);
  expect("the sum of bytes received", recv["bytes"], totals.received_bytes);
  expect("the count of optional receives", recv["optional"], totals.optional);
  expect("the histogram of members", recv["receives_by_members"], totals.groups);
  if (stats["connections"].size() != 2 * options.connections)
    throw Failure("VERBATIM_STATS has the wrong number of connections");
  for (const Json& connection : stats["connections"]) {
    if (options.expect_completion.empty()) break;
    expect("the completion mode", connection["completion"], options.expect_completion);
  }
}

int run(const Options& options) {
  const std::string stats_path = "/tmp/verbatim-completion-" + std::to_string(::getpid()) + ".json";
  ::setenv("VERBATIM_STATS", stats_path.c_str(), 1);
  Warnings warnings;
  netapi::set_log_callback([&warnings](const netapi::LogLine& line) { warnings.count(line); });
  netapi::Opened opened = netapi::open_plugin(options.plugin, options.api);
  if (opened.plugin == nullptr) throw Failure(opened.error);
  netapi::Plugin& plugin = *opened.plugin;
  const Contexts contexts = make_contexts(plugin, options);
  netapi::Properties properties;
  require(plugin.properties(0, &properties), "getProperties");

  Totals totals;
  PlanOptions plan = options.plan;
  plan.max_members = std::min(options.members, static_cast<std::uint64_t>(properties.max_recvs));
  try {
    for (std::uint64_t i = 0; i < options.connections; ++i) {
      plan.messages = options.plan.messages * (i + 1) / options.connections - plan.first_number;
      run_connection(plugin, contexts, plan, totals);
      plan.first_number += plan.messages;
      ++plan.seed;
    }
  } catch (const Failure& failure) {
    if (!options.expect_wrong) throw;
    std::printf("%s\n", failure.what());  // the plugin can detect a wrong size itself
  }
  if (contexts.recv != contexts.send) require(plugin.finalize(contexts.recv), "finalize");
  require(plugin.finalize(contexts.send), "finalize");
  opened.plugin.reset();  // up to v10, unloading closes the context and writes the statistics
  netapi::set_log_callback({});

  std::printf("%llu messages, %llu bytes, %llu optional; wrong: the bytes of %llu, the sizes of %llu\n",
              static_cast<unsigned long long>(totals.messages), static_cast<unsigned long long>(totals.bytes),
              static_cast<unsigned long long>(totals.optional), static_cast<unsigned long long>(totals.wrong_bytes),
              static_cast<unsigned long long>(totals.wrong_sizes));
  if (options.expect_wrong) {
    ::unlink(stats_path.c_str());
    if (totals.wrong_bytes == 0) throw Failure("no message was wrong");
    return 0;
  }
  if (totals.messages != options.plan.messages) throw Failure("not all messages were sent");
  if (totals.wrong_bytes + totals.wrong_sizes != 0) throw Failure("messages were wrong");
  if (warnings.others != 0) throw Failure("the plugin logged unexpected warnings");
  expect("the count of lines about atomics", warnings.fallbacks, options.expect_fallbacks);
  check_stats(stats_path, options, totals);
  ::unlink(stats_path.c_str());
  return 0;
}

}  // namespace
}  // namespace verbatim::completion

int main(int argc, char** argv) {
  try {
    return verbatim::completion::run(verbatim::completion::parse(argc, argv));
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "completion: %s\n", failure.what());
    return 1;
  }
}
