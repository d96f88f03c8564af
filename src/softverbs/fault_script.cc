#include "softverbs/fault_script.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <span>
#include <system_error>

namespace verbatim::softverbs {
namespace {

// ---- values ----

bool read_number(std::string_view text, std::uint64_t& value) {
  int base = 10;
  if (text.starts_with("0x")) {
    text.remove_prefix(2);
    base = 16;
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return error == std::errc{} && end == text.data() + text.size();
}

bool read_number32(std::string_view text, std::uint32_t& value) {
  std::uint64_t wide = 0;
  if (!read_number(text, wide) || wide > ~0U) return false;
  value = static_cast<std::uint32_t>(wide);
  return true;
}

bool read_positive(std::string_view text, std::uint64_t& value) {
  return read_number(text, value) && value != 0;
}

bool read_count(std::string_view text, std::uint64_t& value) {
  if (text != "all") return read_positive(text, value);
  value = kWithoutEnd;
  return true;
}

bool read_rate(std::string_view text, double& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value > 0 && value <= 1;
}

struct Operation {
  std::string_view name;
  ibv_wr_opcode opcode;
};

constexpr std::array kOperations{
    Operation{"send", IBV_WR_SEND},
    Operation{"send_imm", IBV_WR_SEND_WITH_IMM},
    Operation{"write", IBV_WR_RDMA_WRITE},
    Operation{"write_imm", IBV_WR_RDMA_WRITE_WITH_IMM},
    Operation{"read", IBV_WR_RDMA_READ},
    Operation{"cmp_swap", IBV_WR_ATOMIC_CMP_AND_SWP},
    Operation{"fetch_add", IBV_WR_ATOMIC_FETCH_AND_ADD},
};

std::string_view cut(std::string_view& text, std::string_view separators) {
  const std::size_t end = std::min(text.find_first_of(separators), text.size());
  const std::string_view head = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return head;
}

bool read_operations(std::string_view text, std::uint32_t& opcodes) {
  opcodes = 0;
  while (!text.empty()) {
    const std::string_view name = cut(text, ",");
    const auto* found = std::find_if(kOperations.begin(), kOperations.end(),
                                     [&](const Operation& operation) { return operation.name == name; });
    if (found == kOperations.end()) return false;
    opcodes |= 1U << found->opcode;
  }
  return opcodes != 0;
}

bool read_qp(std::string_view text, FaultClause& clause) {
  if (text == "any" || text == "each") {
    clause.qp_choice = text == "any" ? QpChoice::kAny : QpChoice::kEach;
    return true;
  }
  clause.qp_choice = QpChoice::kOrdinal;
  return read_number32(text, clause.qp) && clause.qp != 0;
}

// ---- keys ----

// A word of a clause. `read` takes what stands behind '=', or nothing where there is no '='.
struct Key {
  std::string_view name;
  std::string_view expected;
  bool (*read)(std::string_view value, FaultClause& clause);
};

constexpr Key kOp{"op", "any of send, send_imm, write, write_imm, read, cmp_swap, fetch_add, with ',' between",
                  [](std::string_view value, FaultClause& c) { return read_operations(value, c.opcodes); }};
constexpr Key kQp{"qp", "any, each, or the QP's place in the order of creation, from 1", read_qp};
constexpr Key kQpn{"qpn", "a QP number", [](std::string_view value, FaultClause& c) {
                     c.qp_choice = QpChoice::kNumber;
                     return read_number32(value, c.qp);
                   }};
constexpr Key kDevice{"device", "the number of a device, from 0",
                      [](std::string_view value, FaultClause& c) { return read_number32(value, c.device); }};
constexpr Key kLast{"last", "no value", [](std::string_view value, FaultClause& c) {
                      c.only_last = true;
                      return value.empty();
                    }};
constexpr Key kNth{"nth", "a number from 1",
                   [](std::string_view value, FaultClause& c) { return read_positive(value, c.nth); }};
constexpr Key kCount{"count", "a number from 1, or all",
                     [](std::string_view value, FaultClause& c) { return read_count(value, c.count); }};
constexpr Key kTimes{"times", "a number from 1, or all",
                     [](std::string_view value, FaultClause& c) { return read_count(value, c.times); }};
constexpr Key kRate{"rate", "a probability above 0, up to 1",
                    [](std::string_view value, FaultClause& c) { return read_rate(value, c.rate); }};
constexpr Key kSeedValue{"seed", "a number",
                         [](std::string_view value, FaultClause& c) { return read_number(value, c.seed); }};

// ---- clauses ----

struct Form {
  std::string_view name;
  FaultKind kind;
  std::span<const Key* const> keys;
  std::string_view required;  // name of a key, or empty
};

constexpr std::array kLossKeys{&kOp, &kQp, &kQpn, &kDevice, &kLast, &kNth, &kCount, &kTimes, &kRate};

constexpr std::array kForms{
    Form{"drop-ack", FaultKind::kDropAck, kLossKeys, ""},
    Form{"drop-request", FaultKind::kDropRequest, kLossKeys, ""},
    Form{"loss", FaultKind::kLoss, kLossKeys, "rate"},
};

constexpr std::uint64_t kByKind = 0;  // `count` was not given

constexpr std::string_view kBlanks = " \t\r";

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

std::string refusal(std::string_view clause, const std::string& why) {
  return "\"" + std::string(clause) + "\": " + why;
}

template <typename Items, typename Name>
std::string names(const Items& items, Name name) {
  std::string list;
  for (const auto& item : items) list += (list.empty() ? "" : ", ") + std::string(name(item));
  return list;
}

// Reads one word into the clause; what is wrong with it otherwise.
std::optional<std::string> read_word(const Form& form, std::string_view word, FaultClause& clause) {
  const std::size_t equals = word.find('=');
  const std::string_view name = word.substr(0, equals);
  const std::string_view value = equals == std::string_view::npos ? std::string_view{} : word.substr(equals + 1);
  const auto found =
      std::find_if(form.keys.begin(), form.keys.end(), [&](const Key* key) { return key->name == name; });
  if (found == form.keys.end()) {
    return std::string(form.name) + " takes " + names(form.keys, [](const Key* key) { return key->name; }) + ", not " +
           std::string(name);
  }
  if ((*found)->read(value, clause)) return std::nullopt;
  return std::string(name) + " takes " + std::string((*found)->expected);
}

std::variant<FaultClause, std::string> parse_clause(std::string_view text) {
  FaultClause clause;
  clause.text = text;
  clause.count = kByKind;
  if (text.starts_with("seed=")) {
    clause.kind = FaultKind::kSeed;
    if (kSeedValue.read(text.substr(5), clause)) return clause;
    return refusal(text, "seed takes a number");
  }
  std::string_view rest = text;
  const std::string_view name = cut(rest, kBlanks);
  const auto* form = std::find_if(kForms.begin(), kForms.end(), [&](const Form& f) { return f.name == name; });
  if (form == kForms.end()) {
    return refusal(text,
                   "no such fault; there are " + names(kForms, [](const Form& f) { return f.name; }) + ", and seed=N");
  }
  clause.kind = form->kind;
  bool has_required = form->required.empty();
  while (!rest.empty()) {
    const std::string_view word = cut(rest, kBlanks);
    if (word.empty()) continue;
    if (std::optional<std::string> wrong = read_word(*form, word, clause)) return refusal(text, *wrong);
    if (word.substr(0, word.find('=')) == form->required) has_required = true;
  }
  if (clause.count == kByKind) clause.count = clause.rate > 0 ? kWithoutEnd : 1;
  if (!has_required) return refusal(text, std::string(form->required) + "= is needed");
  return clause;
}

}  // namespace

std::variant<FaultScript, std::string> parse_faults(std::string_view text) {
  FaultScript script;
  while (!text.empty()) {
    std::string_view line = cut(text, "\n");
    line = line.substr(0, line.find('#'));
    while (!line.empty()) {
      const std::string_view clause = trimmed(cut(line, ";"));
      if (clause.empty()) continue;
      std::variant<FaultClause, std::string> parsed = parse_clause(clause);
      if (auto* refused = std::get_if<std::string>(&parsed)) return std::move(*refused);
      script.push_back(std::get<FaultClause>(std::move(parsed)));
    }
  }
  return script;
}

}  // namespace verbatim::softverbs
