// Fuzzes the parsers of user input: settings of the plugin, HCA filters, and fault scripts of softverbs.
#include <algorithm>
#include <array>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "fuzz.h"
#include "softverbs/host/fault_script.h"
#include "verbs/hca_filter.h"

namespace {

using fuzz::require;

constexpr std::array kVariables = {
    "VERBATIM_HCA",
    "VERBATIM_GID_INDEX",
    "VERBATIM_TC",
    "VERBATIM_QPS_PER_CONNECTION",
    "VERBATIM_COMPLETION",
    "VERBATIM_AR_THRESHOLD",
    "VERBATIM_SOCKET_IFNAME",
    "VERBATIM_RELAXED_ORDERING",
    "VERBATIM_QP_ORDER",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "VERBATIM_MAX_RECVS",
};

int g_warnings = 0;

void read_settings(const char* variable, const std::string& value) {
  g_warnings = 0;
  ::setenv(variable, value.c_str(), 1);
  const verbatim::Result<verbatim::Config> config = verbatim::Config::from_environment();
  ::unsetenv(variable);
  require(config ? g_warnings == 0 : g_warnings == 1, "a setting is accepted, or refused with one warning");
  if (config) require(config->max_recvs >= 1 && config->max_recvs <= 8, "an accepted setting is within its range");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  verbatim::set_log_sink([](verbatim::LogLevel level, const char*, int, const char* text) {
    if (level != verbatim::LogLevel::kWarn) return;
    ++g_warnings;
    require(std::strchr(text, '\n') == nullptr, "a warning is one line");
  });
  std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 3 == 0) {
    const auto script = verbatim::softverbs::parse_faults(text);
    if (script.index() == 1) {
      const std::string& error = std::get<std::string>(script);
      require(!error.empty() && error.find('\n') == std::string::npos, "an error in a fault script is one line");
    }
    return 0;
  }
  text.resize(std::min(text.size(), text.find('\0')));
  if (data[0] % 3 == 1) {
    static_cast<void>(verbatim::HcaFilter::parse(text));
    read_settings("VERBATIM_HCA", text);
    return 0;
  }
  read_settings(kVariables[data[0] / 3 % kVariables.size()], text);
  return 0;
}
