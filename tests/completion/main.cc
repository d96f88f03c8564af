// Many messages, all of which must be right, with both completion modes (immediate and atomic). One QP and several QPs
// use different code. Two and eight QPs use the same code as four, so they run only with --full.
//: program completion optimized sources=plan.cc,traffic.cc link=netapi,json
//: set imm args='--expect-completion imm' VERBATIM_COMPLETION=imm
//: set atomic args='--expect-completion atomic' VERBATIM_COMPLETION=atomic
//: set disorder args='--messages 10000 --large-every 100'
//:   + SOFTVERBS_ORDERING=adaptive-routing VERBATIM_ADAPTIVE_ROUTING=1
//: set two SOFTVERBS_ENGINE=inline VERBATIM_QPS_PER_CONNECTION=2
//: set all VERBATIM_SPLIT_DATA_ON_QPS=1
//: set auto
//: test completion-{} use={mode}
// A million messages with the inline engine, which keeps the order of packets; fewer with reordering.
//:   inline-{mode}-qps-{qps} mode=imm,atomic qps=1,4 args='--messages 1000000' SOFTVERBS_ENGINE=inline
//:   + VERBATIM_QPS_PER_CONNECTION={qps}
//:   inline-{mode}-qps-{qps} full mode=imm,atomic qps=2,8 args='--messages 1000000' SOFTVERBS_ENGINE=inline
//:   + VERBATIM_QPS_PER_CONNECTION={qps}
//:   disorder-{mode}-qps-{qps}-split-{split} mode=imm,atomic qps=1,4 split=auto,all use=disorder,{split}
//:   + VERBATIM_QPS_PER_CONNECTION={qps}
//:   disorder-{mode}-qps-{qps}-split-{split} full mode=imm,atomic qps=2,8 split=auto,all use=disorder,{split}
//:   + VERBATIM_QPS_PER_CONNECTION={qps}
//:   v{version}-{mode} version=6,9 mode=imm,atomic use=two args='--api {version} --messages 50000'
//:   optional-v{version}-{mode} version=9,12 mode=imm,atomic use=two
//:   + args='--api {version} --optional --messages 100000'
//:   optional-disorder-{mode} mode=imm,atomic use=disorder args=--optional VERBATIM_QPS_PER_CONNECTION=4
// Optional groups over several QPs end with empty WRITEs, whose segment an irdma device would send.
//:   optional-first-sge-{mode} mode=imm,atomic args='--optional --messages 10000 --members 8 --large-every 10'
//:   + SOFTVERBS_EMPTY_WRITE=first-sge VERBATIM_QPS_PER_CONNECTION=4 VERBATIM_SPLIT_DATA_ON_QPS=1
// The fetch-and-add guarantees that the data is in memory before its signal. A WRITE as signal must lead to wrong data
// if WRITEs can be reordered, and only then.
//: set plain-signal args='--messages 10000'
//:   + VERBATIM_VERBS_LIBRARY={altered_verbs} ALTERED_VERBS=plain-signal
//: set thread args='--members 8' SOFTVERBS_ENGINE=thread
//: set inline args='--members 1' SOFTVERBS_ENGINE=inline
//: test completion-{} use=plain-signal,atomic,{engine}
//:   plain-signal-in-order-{engine} engine=thread,inline
//:   plain-signal-disorder-{engine} engine=thread,inline args=--expect-wrong SOFTVERBS_ORDERING=adaptive-routing
//:   atomic-signal-disorder-{engine} engine=thread,inline ALTERED_VERBS= SOFTVERBS_ORDERING=adaptive-routing
// If an end cannot or does not want to use atomics, immediates are used, and each context logs one warning.
//: set no-atomics VERBATIM_VERBS_LIBRARY={altered_verbs} ALTERED_VERBS=no-atomics
//: set both args='--send-completion atomic --recv-completion atomic'
//: test completion-{} args='--messages 3000 --connections 3'
//:   fallback-no-atomics use=no-atomics args='--expect-completion imm --expect-fallbacks 1' VERBATIM_COMPLETION=atomic
//:   fallback-no-atomics-two-contexts use=no-atomics,both args='--expect-completion imm --expect-fallbacks 2'
//:   no-fallback-two-contexts use=both args='--expect-completion atomic'
//:   fallback-{sender}-to-atomic sender=imm,auto args='--expect-completion imm --expect-fallbacks 1'
//:   + args='--send-completion {sender} --recv-completion atomic'
//:   fallback-atomic-to-imm args='--expect-completion imm --expect-fallbacks 1'
//:   + args='--send-completion atomic --recv-completion imm'

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
