// The main function: the options of run_program and --connections N.
#include <cstdlib>
#include <iostream>

#include "conformance.h"
#include "netapi/log.h"
#include "process.h"
#include "roles.h"

namespace conformance {

std::size_t& connections() {
  static std::size_t count = 1000;
  return count;
}

int run_role(const std::string& role, int api) {
  netapi::set_log_callback([](const netapi::LogLine& line) {
    if (line.level == nccl::DebugLogLevel::kWarn) std::cerr << line.text << "\n";
  });
  if (role == "exit-unload") unload_at_exit();
  netapi::Opened opened = netapi::open_plugin(options().plugin, api);
  void* context = nullptr;
  if (opened.plugin == nullptr || opened.plugin->init(1, {}, &context) != nccl::Result::kSuccess) {
    std::cerr << "no plugin " << opened.error << "\n";
    return 2;
  }
  if (role == "exit-busy") return exit_busy(std::move(opened.plugin), context);
  if (role == "exit-unload") return exit_with_pending_close(std::move(opened.plugin), context);
  if (role == "exit-idle") return exit_idle(std::move(opened.plugin), context);
  if (role == "close-at-once") return close_at_once(*opened.plugin, context);
  if (role.starts_with("receivers-")) return receive_many(*opened.plugin, context, std::stoul(role.substr(10)));
  std::cerr << "no role " << role << "\n";
  return 2;
}

}  // namespace conformance

int main(int argc, char** argv) {
  return conformance::run_program(argc, argv, [](const std::string& option, const char* value) {
    if (option == "--connections") conformance::connections() = std::strtoul(value, nullptr, 10);
  });
}
