#include "verbatim-kv/stats.h"

#include <algorithm>
#include <cmath>

namespace verbatim::kv {
namespace {

using ranks::Json;

constexpr std::size_t kMaxErrors = 5;

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// Calls `visit` with every integer counter and its name in the report.
template <typename Stats, typename Visit>
void each_counter(Stats& stats, Visit visit) {
  visit("validation_ns", stats.validation_ns);
  visit("validations", stats.validations);
  visit("wrong_bytes", stats.wrong_bytes);
  visit("connections", stats.connections);
  visit("sent_messages", stats.sent_messages);
  visit("sent_bytes", stats.sent_bytes);
  visit("notifications", stats.notifications);
  visit("received_messages", stats.received_messages);
  visit("received_bytes", stats.received_bytes);
  visit("served_bytes", stats.served_bytes);
  visit("served", stats.served);
  visit("timed_messages", stats.timed_messages);
  visit("timed_bytes", stats.timed_bytes);
  visit("crc_errors", stats.crc_errors);
  visit("crc_sum", stats.crc_sum);
  visit("fresh_connections", stats.fallbacks[static_cast<int>(FallbackStage::kFresh)]);
  visit("staged_copies", stats.fallbacks[static_cast<int>(FallbackStage::kStaged)]);
  visit("recomputes", stats.fallbacks[static_cast<int>(FallbackStage::kRecompute)]);
}

}  // namespace

void FamilyStats::add_error(const std::string& what) {
  if (errors.size() < kMaxErrors) errors.push_back(what);
}

void FamilyStats::add(const FamilyStats& other) {
  std::vector<std::uint64_t> other_values;
  each_counter(other, [&](const char*, std::uint64_t value) { other_values.push_back(value); });
  auto value = other_values.begin();
  each_counter(*this, [&](const char*, std::uint64_t& own) { own += *value++; });
  for (const auto& [members, count] : other.groups) groups[members] += count;
  elapsed_ns = std::max(elapsed_ns, other.elapsed_ns);
  timed_ns = std::max(timed_ns, other.timed_ns);
  check_ns = std::max(check_ns, other.check_ns);
  fallback_ns = std::max(fallback_ns, other.fallback_ns);
  append(rejected, other.rejected);
  append(rejection_times, other.rejection_times);
  append(errors, other.errors);
  append(latencies_ns, other.latencies_ns);
  append(lost, other.lost);
}

Json to_json(const FamilyStats& stats) {
  Json json;
  each_counter(stats, [&](const char* name, std::uint64_t value) { json[name] = value; });
  json["elapsed_ns"] = stats.elapsed_ns;
  json["timed_ns"] = stats.timed_ns;
  json["check_ns"] = stats.check_ns;
  json["fallback_ns"] = stats.fallback_ns;
  json["groups"] = Json::object();
  for (const auto& [members, count] : stats.groups) json["groups"][std::to_string(members)] = count;
  json["rejected"] = Json::array();
  for (const RejectedRequest& rejected : stats.rejected) {
    json["rejected"].push_back({{"request", rejected.request},
                                {"found_by", rejected.found_by},
                                {"code", static_cast<int>(rejected.code)},
                                {"kind", rejection_name(rejected.code)},
                                {"text", rejected.text}});
  }
  json["rejection_times"] = Json::array();
  for (const RejectionTime& time : stats.rejection_times) {
    json["rejection_times"].push_back({{"request", time.request}, {"after_ns", time.after_ns}});
  }
  json["recompute"] = Json::array();
  for (const Lost& lost : stats.lost) {
    json["recompute"].push_back({{"request", lost.request}, {"first", lost.first}, {"blocks", lost.blocks}});
  }
  json["errors"] = stats.errors;
  json["latencies_ns"] = stats.latencies_ns;
  return json;
}

FamilyStats from_json(const Json& json) {
  FamilyStats stats;
  each_counter(stats, [&](const char* name, std::uint64_t& value) { value = json.at(name); });
  stats.elapsed_ns = json.at("elapsed_ns");
  stats.timed_ns = json.at("timed_ns");
  stats.check_ns = json.at("check_ns");
  stats.fallback_ns = json.at("fallback_ns");
  for (const auto& [members, count] : json.at("groups").items()) stats.groups[std::stoull(members)] = count;
  for (const Json& rejected : json.at("rejected")) {
    stats.rejected.push_back({rejected.at("request"), rejected.at("found_by"),
                              static_cast<RejectionCode>(rejected.at("code").get<int>()), rejected.at("text")});
  }
  for (const Json& time : json.at("rejection_times")) {
    stats.rejection_times.push_back({time.at("request"), time.at("after_ns")});
  }
  for (const Json& lost : json.at("recompute")) {
    stats.lost.push_back({lost.at("request"), lost.at("first"), lost.at("blocks")});
  }
  stats.errors = json.at("errors").get<std::vector<std::string>>();
  stats.latencies_ns = json.at("latencies_ns").get<std::vector<std::uint64_t>>();
  return stats;
}

}  // namespace verbatim::kv
