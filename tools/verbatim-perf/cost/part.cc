#include "verbatim-perf/cost/part.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "verbatim-perf/child.h"

namespace verbatim::perf::cost {
namespace {

namespace fs = std::filesystem;

template <typename Number>
std::string list_of(const std::vector<Number>& values) {
  std::string text;
  for (const Number value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

}  // namespace

Json run_part(const PartSubject& subject, const std::string& part, std::vector<std::string> variables,
              const std::vector<std::string>& wrapper) {
  const CostOptions& options = subject.options;
  const fs::path result = subject.scratch / (part + ".json");
  std::vector<std::string> arguments = wrapper;
  for (const std::string& argument : {fs::read_symlink("/proc/self/exe").string(),
                                      std::string("cost"),
                                      std::string("--plugin"),
                                      subject.plugin,
                                      std::string("--api"),
                                      std::to_string(options.api_version),
                                      std::string("--sizes"),
                                      list_of(options.sizes),
                                      std::string("--groups"),
                                      list_of(options.groups),
                                      std::string("--messages"),
                                      std::to_string(options.messages),
                                      std::string("--connections"),
                                      std::to_string(options.connections),
                                      std::string("--room"),
                                      std::to_string(options.room),
                                      std::string("--merge"),
                                      std::to_string(options.merge),
                                      std::string("--part"),
                                      part,
                                      std::string("--result"),
                                      result.string()}) {
    arguments.push_back(argument);
  }
  if (options.plugin_log) arguments.emplace_back("--plugin-log");
  if (options.optional) arguments.emplace_back("--optional");
  variables.emplace_back("SOFTVERBS_ENGINE=inline");
  variables.push_back("SOFTVERBS_NAMESPACE=cost-" + std::to_string(::getpid()));
  run_process(arguments, variables, subject.scratch / (part + ".log"));
  std::ifstream file(result);
  return Json::parse(file);
}

std::vector<std::string> callgrind(const std::string& dumps_prefix) {
  return {"valgrind", "--tool=callgrind", "--collect-atstart=no", "--callgrind-out-file=" + dumps_prefix};
}

Json divided(const Json& counted, double count) {
  Json result;
  for (const auto& [key, value] : counted.items()) {
    if (key == "bytes" || key == "group") {
      result[key] = value;
    } else if (key == "by_opcode") {
      for (const auto& [opcode, posted] : value.items()) result[key][opcode] = posted.get<double>() / count;
    } else {
      result[key] = value.get<double>() / count;
    }
  }
  return result;
}

Json json_of(const Instructions& instructions) {
  return {{"plugin", instructions.plugin}, {"libc", instructions.libc}, {"verbs", instructions.verbs}};
}

double number(const Json& object, const char* key) {
  return object[key].get<double>();
}

}  // namespace verbatim::perf::cost
