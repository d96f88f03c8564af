#include "verbatim-kv/nixl_faults.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "verbatim-kv/inject.h"
#include "workload/kv/validation.h"

namespace verbatim::kv {
namespace {

using ranks::Json;

// Kinds of invalid lists. The geometry is compared when a connection is made, not for each list.
std::vector<std::string> list_kinds() {
  std::vector<std::string> kinds;
  for (int code = 1; code <= kRejectionCodes; ++code) {
    const auto named = static_cast<RejectionCode>(code);
    if (named != RejectionCode::kGeometryMismatch) kinds.emplace_back(rejection_name(named));
  }
  return kinds;
}

std::string milliseconds(std::uint64_t ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%.2f ms", static_cast<double>(ns) / 1e6);
  return text;
}

std::string after(std::uint64_t ns) {
  return milliseconds(ns) + ": ";
}

// "X bytes of Y" for each Y that a bad list has overwritten.
std::string overwritten(const Json& bad) {
  std::string text;
  for (const auto& [where, bytes] : bad.at("overwritten").items()) {
    text += (text.empty() ? "" : ", ") + bytes.dump() + " bytes of " + where;
  }
  return text;
}

std::string outcome(const Json& bad) {
  std::string text = bad.at("result").get<std::string>();
  if (const std::uint64_t ns = bad.at("call_ns"); ns > 0) text += " by a call of " + milliseconds(ns);
  if (const std::string error_text = bad.at("error"); !error_text.empty()) text += " (" + error_text + ")";
  if (const std::uint64_t wrong = bad.at("wrong_in_request"); wrong > 0) {
    text += "; " + std::to_string(wrong) + " wrong bytes in the request";
  }
  if (const std::string others = overwritten(bad); !others.empty()) text += "; overwritten: " + others;
  return after(bad.at("after_ns")) + text;
}

// What happened with an invalid list of the kind in the report of a run.
std::string outcome_in(const Json& report, const std::string& kind) {
  if (report.contains("bad_lists")) {
    for (const Json& bad : report.at("bad_lists")) {
      if (bad.at("kind") == kind) return outcome(bad);
    }
    return "not found";
  }
  for (const Json& family : report.at("families")) {
    for (const Json& rejected : family.at("rejected")) {
      if (rejected.at("kind") != kind) continue;
      std::uint64_t ns = 0;
      for (const Json& time : family.at("rejection_times")) {
        if (time.at("request") == rejected.at("request")) ns = time.at("after_ns");
      }
      return after(ns) + "rejected by the " + rejected.at("found_by").get<std::string>() + " side, nothing posted";
    }
  }
  return "not found";
}

std::string others(const Json& report) {
  std::string text;
  for (const Json& family : report.at("families")) {
    const std::uint64_t planned = family.at("plan").at("requests");
    text += family.at("name").get<std::string>() + " served " + family.at("served").dump() + " of " +
            std::to_string(planned) + ", " + family.at("wrong_bytes").dump() + " other wrong bytes; ";
  }
  text.resize(text.size() - 2);
  return text;
}

}  // namespace

std::string describe_bad_list(const Json& bad) {
  return bad.at("family").get<std::string>() + " request " + bad.at("request").dump() + ", " +
         bad.at("kind").get<std::string>() + ": " + outcome(bad);
}

std::vector<std::string> bad_list_faults(const std::string& family) {
  std::vector<std::string> faults;
  const std::string settings = ",at=peer,family=" + family;
  for (const std::string& kind : list_kinds()) faults.push_back(kind + settings);
  return faults;
}

Json compare_bad_lists(const Options& options, std::vector<ranks::Variant> variants, int argc, char** argv) {
  const std::string family =
      std::max_element(options.geometries.begin(), options.geometries.end(), [](const Geometry& a, const Geometry& b) {
        return a.family < b.family;
      })->name;  // the second one, also with --lf-first
  for (ranks::Variant& variant : variants) {
    for (const std::string& fault : bad_list_faults(family)) variant.arguments.push_back("--inject=" + fault);
  }
  const auto reports = ranks::run_rounds(
      variants, 1, {{"--compare", "--rounds", "--json", "--plugin", "--warmup"}, {"--no-check"}}, argc, argv);
  Json json = Json::array();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const Json& report = reports.by_variant[i].front();
    std::printf(
        "# invalid lists of %s over %s, one run with every byte checked; times from the start of the request:\n",
        family.c_str(), variants[i].name.c_str());
    Json entry{{"over", variants[i].name}, {"family", family}, {"lists", Json::array()}};
    for (const std::string& kind : list_kinds()) {
      const std::string found = outcome_in(report, kind);
      std::printf("#   %-24s %s\n", kind.c_str(), found.c_str());
      entry["lists"].push_back({{"kind", kind}, {"outcome", found}});
    }
    std::printf("#   %-24s %s\n", "the other requests", others(report).c_str());
    entry["others"] = others(report);
    entry["run"] = report;
    json.push_back(std::move(entry));
  }
  return json;
}

}  // namespace verbatim::kv
