#include "verbatim-kv/inject.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <stdexcept>

namespace verbatim::kv {
namespace {

constexpr std::uint64_t kFarAway = std::uint64_t{1}
                                   << 46;  // added to an address: outside of all memory of this process

std::uint32_t parse_number(const std::string& text, const std::string& value) {
  if (value.empty() || value.size() > 9 || value.find_first_not_of("0123456789") != std::string::npos) {
    throw std::invalid_argument("--inject " + text + ": '" + value + "' is not a number");
  }
  return static_cast<std::uint32_t>(std::stoul(value));
}

Fault fault_of(const std::string& text, const std::string& kind) {
  for (int code = 1; code <= kRejectionCodes; ++code) {
    const auto named = static_cast<RejectionCode>(code);
    if (named != RejectionCode::kGeometryMismatch && kind == rejection_name(named)) {
      return {.kind = FaultKind::kInvalidList, .code = named};
    }
  }
  if (kind == "geometry") return {.kind = FaultKind::kGeometry};
  if (kind == "kill") return {.kind = FaultKind::kKill};
  if (kind == "lost-notification") return {.kind = FaultKind::kLostNotification};
  if (kind == "delay") return {.kind = FaultKind::kDelay};
  std::string known;
  for (int code = 1; code <= kRejectionCodes; ++code) {
    const auto named = static_cast<RejectionCode>(code);
    if (named != RejectionCode::kGeometryMismatch) known.append(rejection_name(named)).append(", ");
  }
  throw std::invalid_argument("--inject " + text + ": unknown fault '" + kind + "'; known faults: " + known +
                              "geometry, kill, lost-notification, delay");
}

}  // namespace

std::vector<Fault> parse_fault(const std::string& text) {
  std::istringstream words(text);
  std::string word;
  std::getline(words, word, ',');
  Fault fault = fault_of(text, word);
  if (text.back() == ',') throw std::invalid_argument("--inject " + text + ": ends with a comma");
  std::string at;
  while (std::getline(words, word, ',')) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "family" && (value == "kv" || value == "lf")) {
      fault.family = value == "kv" ? FamilyId::kKv : FamilyId::kLf;
    } else if (key == "request") {
      fault.request = parse_number(text, value);
    } else if (key == "times") {
      fault.times = parse_number(text, value);
    } else if (key == "delay-ms") {
      fault.delay_ms = parse_number(text, value);
    } else if (key == "at" && fault.kind == FaultKind::kInvalidList && (value == "local" || value == "peer")) {
      at = value;
    } else {
      throw std::invalid_argument(
          std::string("--inject ").append(text).append(": '").append(word).append("' is not a valid setting"));
    }
  }
  fault.in_flight = at == "peer";
  std::vector<Fault> faults{fault};
  if (fault.kind == FaultKind::kInvalidList && at.empty()) {
    faults.push_back(fault);
    faults.back().in_flight = true;
    if (fault.request) ++*faults.back().request;
  }
  return faults;
}

void assign_requests(std::vector<Fault>& faults, const std::vector<Request>& requests, std::uint32_t kv_block_tokens,
                     std::uint32_t lf_block_tokens) {
  std::set<std::uint32_t> used;
  for (const Fault& fault : faults) {
    if (!fault.request) continue;
    if (*fault.request >= requests.size()) {
      throw std::invalid_argument("--inject: there is no request " + std::to_string(*fault.request));
    }
    used.insert(*fault.request);
  }
  for (std::size_t i = 0; i < faults.size(); ++i) {
    Fault& fault = faults[i];
    if (fault.request || fault.kind == FaultKind::kGeometry) continue;
    const std::uint32_t block_tokens = fault.family == FamilyId::kKv ? kv_block_tokens : lf_block_tokens;
    const auto is_suitable = [&](const Request& request) {
      return !used.contains(request.id) && (fault.kind != FaultKind::kInvalidList ||
                                            request.blocks(block_tokens) - request.hit_blocks(block_tokens) > 1);
    };
    const std::size_t wanted = (i + 1) * requests.size() / (faults.size() + 1);
    for (std::size_t step = 0; step < requests.size() && !fault.request; ++step) {
      const Request& request = requests[(wanted + step) % requests.size()];
      if (is_suitable(request)) fault.request = request.id;
    }
    if (!fault.request) throw std::invalid_argument("--inject: there are too few requests (with at least two blocks)");
    used.insert(*fault.request);
  }
}

void corrupt_block(BlockList& list, RejectionCode code, std::size_t num_blocks) {
  switch (code) {
    case RejectionCode::kWrongFamily:
      list.family = list.family == FamilyId::kKv ? FamilyId::kLf : FamilyId::kKv;
      return;
    case RejectionCode::kGeometryMismatch:
      ++list.geometry_hash;
      return;
    case RejectionCode::kCountMismatch:
      list.blocks.pop_back();
      return;
    case RejectionCode::kLengthMismatch:
      list.piece_bytes *= 2;
      return;
    case RejectionCode::kBaseConflict:
      list.block_len *= 2;
      return;
    case RejectionCode::kUnregistered:
      list.bases.back() ^= kFarAway;
      return;
    case RejectionCode::kIndexOutOfRange:
      list.blocks.back() = static_cast<std::uint32_t>(num_blocks);
      return;
    case RejectionCode::kOverlappingDestination:
      list.blocks.back() = list.blocks.front();
      return;
  }
}

Faults::Faults(const std::vector<Fault>& all, FamilyId family) {
  std::copy_if(all.begin(), all.end(), std::back_inserter(own_),
               [family](const Fault& fault) { return fault.family == family; });
}

const Fault* Faults::find(FaultKind kind, std::uint32_t request, std::uint32_t attempt) const {
  for (const Fault& fault : own_) {
    if (fault.kind == kind && fault.request == request && attempt < fault.times) return &fault;
  }
  return nullptr;
}

bool Faults::has(FaultKind kind) const {
  return std::any_of(own_.begin(), own_.end(), [kind](const Fault& fault) { return fault.kind == kind; });
}

}  // namespace verbatim::kv
