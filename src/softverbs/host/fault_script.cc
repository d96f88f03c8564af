#include "softverbs/host/fault_script.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <system_error>

namespace verbatim::softverbs {
namespace {

constexpr std::string_view kBlanks = " \t\r";
constexpr std::uint64_t kNotGiven = 0;  // the clause has no `count`

// Removes and returns the part before the first separator.
std::string_view cut(std::string_view& text, std::string_view separators) {
  const std::size_t end = std::min(text.find_first_of(separators), text.size());
  const std::string_view head = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return head;
}

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

struct Unit {
  std::string_view name;
  std::uint64_t factor;
};

constexpr std::array kTimeUnits{Unit{"ns", 1}, Unit{"us", 1000}, Unit{"ms", 1'000'000}, Unit{"s", 1'000'000'000}};
constexpr std::array kSizeUnits{Unit{"", 1}, Unit{"K", 1U << 10}, Unit{"M", 1U << 20}, Unit{"G", 1U << 30}};

bool read_measure(std::string_view text, std::span<const Unit> units, std::uint64_t& value) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  for (const Unit& unit : units) {
    if (text.substr(digits) != unit.name) continue;
    return read_number(text.substr(0, digits), value) && !__builtin_mul_overflow(value, unit.factor, &value);
  }
  return false;
}

bool read_time(std::string_view text, std::uint64_t& value_ns) {
  return read_measure(text, kTimeUnits, value_ns);
}

bool read_size(std::string_view text, std::uint64_t& bytes) {
  return read_measure(text, kSizeUnits, bytes);
}

template <typename Value>
struct Named {
  std::string_view name;
  Value value;
};

template <typename Value>
bool read_name(std::string_view text, std::span<const Named<Value>> names, Value& value) {
  for (const Named<Value>& entry : names) {
    if (entry.name != text) continue;
    value = entry.value;
    return true;
  }
  return false;
}

constexpr std::array<Named<std::uint32_t>, 8> kOperations{{
    {"send", 1U << IBV_WR_SEND},
    {"send_imm", 1U << IBV_WR_SEND_WITH_IMM},
    {"write", 1U << IBV_WR_RDMA_WRITE},
    {"write_imm", 1U << IBV_WR_RDMA_WRITE_WITH_IMM},
    {"read", 1U << IBV_WR_RDMA_READ},
    {"cmp_swap", 1U << IBV_WR_ATOMIC_CMP_AND_SWP},
    {"fetch_add", 1U << IBV_WR_ATOMIC_FETCH_AND_ADD},
    {"recv", kReceiveBit},
}};

bool read_operations(std::string_view text, std::uint32_t& opcodes) {
  opcodes = 0;
  while (!text.empty()) {
    std::uint32_t bit = 0;
    if (!read_name<std::uint32_t>(cut(text, ","), kOperations, bit)) return false;
    opcodes |= bit;
  }
  return opcodes != 0;
}

constexpr std::array<Named<ibv_wc_status>, 17> kStatuses{{
    {"LOC_LEN_ERR", IBV_WC_LOC_LEN_ERR},
    {"LOC_QP_OP_ERR", IBV_WC_LOC_QP_OP_ERR},
    {"LOC_PROT_ERR", IBV_WC_LOC_PROT_ERR},
    {"WR_FLUSH_ERR", IBV_WC_WR_FLUSH_ERR},
    {"MW_BIND_ERR", IBV_WC_MW_BIND_ERR},
    {"BAD_RESP_ERR", IBV_WC_BAD_RESP_ERR},
    {"LOC_ACCESS_ERR", IBV_WC_LOC_ACCESS_ERR},
    {"REM_INV_REQ_ERR", IBV_WC_REM_INV_REQ_ERR},
    {"REM_ACCESS_ERR", IBV_WC_REM_ACCESS_ERR},
    {"REM_OP_ERR", IBV_WC_REM_OP_ERR},
    {"RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR},
    {"RNR_RETRY_EXC_ERR", IBV_WC_RNR_RETRY_EXC_ERR},
    {"LOC_RDD_VIOL_ERR", IBV_WC_LOC_RDD_VIOL_ERR},
    {"REM_ABORT_ERR", IBV_WC_REM_ABORT_ERR},
    {"FATAL_ERR", IBV_WC_FATAL_ERR},
    {"RESP_TIMEOUT_ERR", IBV_WC_RESP_TIMEOUT_ERR},
    {"GENERAL_ERR", IBV_WC_GENERAL_ERR},
}};

constexpr std::array<Named<int>, 18> kErrors{{
    {"EPERM", EPERM},
    {"ENOENT", ENOENT},
    {"EINTR", EINTR},
    {"EIO", EIO},
    {"EAGAIN", EAGAIN},
    {"ENOMEM", ENOMEM},
    {"EACCES", EACCES},
    {"EFAULT", EFAULT},
    {"EBUSY", EBUSY},
    {"ENODEV", ENODEV},
    {"EINVAL", EINVAL},
    {"EMFILE", EMFILE},
    {"ENOSPC", ENOSPC},
    {"ENOSYS", ENOSYS},
    {"ENODATA", ENODATA},
    {"EOPNOTSUPP", EOPNOTSUPP},
    {"ETIMEDOUT", ETIMEDOUT},
    {"EPROTONOSUPPORT", EPROTONOSUPPORT},
}};

constexpr std::array<Named<std::uint32_t>, 3> kGidTypes{{
    {"ib", IBV_GID_TYPE_IB},
    {"rocev1", IBV_GID_TYPE_ROCE_V1},
    {"rocev2", IBV_GID_TYPE_ROCE_V2},
}};

bool read_error(std::string_view text, int& value) {
  if (read_name<int>(text, kErrors, value)) return true;
  std::uint64_t number = 0;
  if (!read_positive(text, number) || number > 4095) return false;  // the kernel's MAX_ERRNO
  value = static_cast<int>(number);
  return true;
}

constexpr std::array<Named<std::uint64_t>, 4> kDataCalls{{
    {"post_send", kPostSendCall},
    {"post_recv", kPostRecvCall},
    {"post_srq_recv", kPostSrqRecvCall},
    {"poll_cq", kPollCqCall},
}};

// Verbs that return nothing, or EOPNOTSUPP in every case.
constexpr std::uint64_t kNeverFailing = call_bit(Verb::kAckCqEvents) | call_bit(Verb::kAckAsyncEvent) |
                                        call_bit(Verb::kQueryRtValuesEx) | call_bit(Verb::kQueryQpDataInOrder) |
                                        call_bit(Verb::kReregMr) | call_bit(Verb::kQueryEce) | call_bit(Verb::kSetEce) |
                                        call_bit(Verb::kAttachMcast);

// A plain name selects all variants: where a source calls ibv_reg_mr, the header calls ibv_reg_mr_iova2.
bool read_verb(std::string_view text, std::uint64_t& calls) {
  constexpr std::string_view kPrefix = "ibv_";
  if (text.starts_with(kPrefix)) text.remove_prefix(kPrefix.size());
  if (read_name<std::uint64_t>(text, kDataCalls, calls)) return true;
  calls = 0;
  for (std::size_t verb = 0; verb < kVerbNames.size(); ++verb) {
    const std::string_view name = std::string_view(kVerbNames[verb]).substr(kPrefix.size());
    if (!name.starts_with(text)) continue;
    const std::string_view variant = name.substr(text.size());
    if (variant.empty() || variant == "_ex" || variant == "_iova" || variant == "_iova2") {
      calls |= call_bit(static_cast<Verb>(verb));
    }
  }
  calls &= ~kNeverFailing;
  return calls != 0;
}

bool read_qp(std::string_view text, FaultClause& clause) {
  if (text == "any" || text == "each") {
    clause.qp_choice = text == "any" ? QpChoice::kAny : QpChoice::kEach;
    return true;
  }
  clause.qp_choice = QpChoice::kOrdinal;
  return read_number32(text, clause.qp) && clause.qp != 0;
}

bool read_pids(std::string_view text, std::array<std::uint32_t, 2>& pids) {
  const std::string_view first = cut(text, ",");
  return read_number32(first, pids[0]) && read_number32(text, pids[1]) && pids[0] != 0 && pids[1] != 0;
}

// An IPv6 address, or an IPv4 address a.b.c.d, which is read as ::ffff:a.b.c.d.
bool read_gid(std::string_view text, ibv_gid& gid) {
  const std::string address(text);
  if (::inet_pton(AF_INET6, address.c_str(), gid.raw) == 1) return true;
  gid = {};
  gid.raw[10] = gid.raw[11] = 0xff;
  return ::inet_pton(AF_INET, address.c_str(), &gid.raw[12]) == 1;
}

// ---- keys ----

// One `key` or `key=value` of a clause. `read` gets the text after '=', empty where there is no '='.
struct Key {
  std::string_view name;
  std::string_view expected;
  bool (*read)(std::string_view value, FaultClause& clause);
};

constexpr std::string_view kNoValue = "no value";
constexpr std::string_view kCountExpected = "a number from 1, or all";
constexpr std::string_view kTimeExpected = "a time such as 500ms: ns, us, ms or s";
constexpr std::string_view kSizeExpected = "a number of bytes, which may end in K, M or G";

constexpr Key kOp{"op", "any of send, send_imm, write, write_imm, read, cmp_swap, fetch_add, separated by ','",
                  [](std::string_view value, FaultClause& c) {
                    return read_operations(value, c.opcodes) && (c.opcodes & kReceiveBit) == 0;
                  }};
constexpr Key kOpOrRecv{"op", "recv, or any of send, send_imm, write, write_imm, read, cmp_swap, fetch_add",
                        [](std::string_view value, FaultClause& c) {
                          return read_operations(value, c.opcodes) &&
                                 ((c.opcodes & kReceiveBit) == 0 || c.opcodes == kReceiveBit);
                        }};
constexpr Key kQp{"qp", "any, each, or the QP's position in the order of creation, from 1", read_qp};
constexpr Key kQpn{"qpn", "a QP number", [](std::string_view value, FaultClause& c) {
                     c.qp_choice = QpChoice::kNumber;
                     return read_number32(value, c.qp);
                   }};
constexpr Key kDevice{"device", "the number of a device, from 0",
                      [](std::string_view value, FaultClause& c) { return read_number32(value, c.device); }};
constexpr Key kPeer{"peer", "the number of a device, from 0",
                    [](std::string_view value, FaultClause& c) { return read_number32(value, c.peer_device); }};
constexpr Key kPids{"pids", "two process numbers separated by ','",
                    [](std::string_view value, FaultClause& c) { return read_pids(value, c.pids); }};
constexpr Key kLast{"last", kNoValue, [](std::string_view value, FaultClause& c) {
                      c.only_last = true;
                      return value.empty();
                    }};
constexpr Key kNth{"nth", "a number from 1",
                   [](std::string_view value, FaultClause& c) { return read_positive(value, c.nth); }};
constexpr Key kCount{"count", kCountExpected,
                     [](std::string_view value, FaultClause& c) { return read_count(value, c.count); }};
constexpr Key kTimes{"times", kCountExpected,
                     [](std::string_view value, FaultClause& c) { return read_count(value, c.times); }};
constexpr Key kRate{"rate", "a probability above 0, up to 1",
                    [](std::string_view value, FaultClause& c) { return read_rate(value, c.rate); }};
constexpr Key kBy{"by", kTimeExpected,
                  [](std::string_view value, FaultClause& c) { return read_time(value, c.delay_ns); }};
constexpr Key kJitter{"jitter", kTimeExpected,
                      [](std::string_view value, FaultClause& c) { return read_time(value, c.jitter_ns); }};
constexpr Key kStatus{
    "status", "an error of ibv_wc_status without the prefix IBV_WC_, such as REM_ACCESS_ERR",
    [](std::string_view value, FaultClause& c) { return read_name<ibv_wc_status>(value, kStatuses, c.status); }};
constexpr Key kVendor{"vendor", "a number",
                      [](std::string_view value, FaultClause& c) { return read_number32(value, c.vendor_error); }};
constexpr Key kAfter{"after", "a number from 1",
                     [](std::string_view value, FaultClause& c) { return read_positive(value, c.after); }};
constexpr Key kAt{"at", kTimeExpected,
                  [](std::string_view value, FaultClause& c) { return read_time(value, c.at_ns); }};
constexpr Key kFor{"for", kTimeExpected,
                   [](std::string_view value, FaultClause& c) { return read_time(value, c.for_ns); }};
constexpr Key kIndex{"index", "an index of the GID table",
                     [](std::string_view value, FaultClause& c) { return read_number32(value, c.gid_index); }};
constexpr Key kAddress{"address", "an IPv4 or IPv6 address, or none", [](std::string_view value, FaultClause& c) {
                         c.gid_valid = value != "none";
                         return !c.gid_valid || read_gid(value, c.gid);
                       }};
constexpr Key kType{"type", "ib, rocev1 or rocev2", [](std::string_view value, FaultClause& c) {
                      return read_name<std::uint32_t>(value, kGidTypes, c.gid_type);
                    }};
constexpr Key kVerb{"verb", "a verb's name, such as reg_mr or modify_qp",
                    [](std::string_view value, FaultClause& c) { return read_verb(value, c.calls); }};
constexpr Key kErrno{"errno", "an errno by name, such as ENOMEM, or by number",
                     [](std::string_view value, FaultClause& c) { return read_error(value, c.error); }};
constexpr Key kMaxBytes{"max-bytes", kSizeExpected,
                        [](std::string_view value, FaultClause& c) { return read_size(value, c.max_bytes); }};
constexpr Key kMaxRegions{"max-regions", "a number",
                          [](std::string_view value, FaultClause& c) { return read_number(value, c.max_regions); }};
constexpr Key kMaxLocked{"max-locked", kSizeExpected,
                         [](std::string_view value, FaultClause& c) { return read_size(value, c.max_locked); }};
constexpr Key kSeedValue{"seed", "a number",
                         [](std::string_view value, FaultClause& c) { return read_number(value, c.seed); }};

// ---- clauses ----

struct Form {
  std::string_view name;
  FaultKind kind;
  std::span<const Key* const> keys;
  std::string_view required;  // name of a required key; empty: none
  std::uint64_t count = 1;    // default of `count`
};

using Keys = std::span<const Key* const>;

constexpr std::array kLossKeys{&kOp, &kQp, &kQpn, &kDevice, &kLast, &kNth, &kCount, &kTimes, &kRate};
constexpr std::array kDelayKeys{&kBy, &kJitter, &kOp, &kQp, &kQpn, &kDevice, &kLast, &kNth, &kCount};
constexpr std::array kRnrKeys{&kOp, &kQp, &kQpn, &kDevice, &kLast, &kNth, &kCount, &kTimes};
constexpr std::array kCompleteKeys{&kStatus, &kVendor, &kOpOrRecv, &kQp, &kQpn, &kDevice, &kNth, &kCount};
constexpr std::array kDropCompletionKeys{&kOpOrRecv, &kQp, &kQpn, &kDevice, &kNth, &kCount};
constexpr std::array kLinkKeys{&kDevice, &kAt, &kFor, &kAfter, &kOp, &kQp, &kQpn};
constexpr std::array kMomentKeys{&kDevice, &kAt, &kAfter, &kOp, &kQp, &kQpn};
constexpr std::array kPairKeys{&kDevice, &kPeer, &kPids, &kAt, &kFor, &kAfter, &kOp, &kQp, &kQpn};
constexpr std::array kUnpairKeys{&kDevice, &kPeer, &kPids, &kAt};
constexpr std::array kFreezeKeys{&kAt, &kFor, &kAfter, &kOp, &kQp, &kQpn};
constexpr std::array kThawKeys{&kAt};
constexpr std::array kGidKeys{&kDevice, &kIndex, &kAddress, &kType, &kAt, &kAfter, &kOp, &kQp, &kQpn};
constexpr std::array kFailKeys{&kVerb, &kErrno, &kNth, &kCount, &kRate, &kDevice};
constexpr std::array kSlowKeys{&kBy, &kVerb, &kNth, &kCount, &kRate, &kDevice};
constexpr std::array kRegistrationKeys{&kMaxBytes, &kMaxRegions, &kMaxLocked, &kErrno};

constexpr std::array kForms{
    Form{"drop-ack", FaultKind::kDropAck, kLossKeys, {}},
    Form{"drop-request", FaultKind::kDropRequest, kLossKeys, {}},
    Form{"loss", FaultKind::kLoss, kLossKeys, "rate"},
    Form{"delay", FaultKind::kDelay, kDelayKeys, "by", kWithoutEnd},
    Form{"rnr", FaultKind::kRnr, kRnrKeys, {}},
    Form{"complete", FaultKind::kComplete, kCompleteKeys, "status"},
    Form{"drop-completion", FaultKind::kDropCompletion, kDropCompletionKeys, {}},
    Form{"link-down", FaultKind::kLinkDown, kLinkKeys, {}},
    Form{"link-up", FaultKind::kLinkUp, kMomentKeys, {}},
    Form{"unreachable", FaultKind::kUnreachable, kPairKeys, {}},
    Form{"reachable", FaultKind::kReachable, kUnpairKeys, {}},
    Form{"device-fatal", FaultKind::kDeviceFatal, kMomentKeys, {}},
    Form{"freeze", FaultKind::kFreeze, kFreezeKeys, {}},
    Form{"thaw", FaultKind::kThaw, kThawKeys, {}},
    Form{"gid", FaultKind::kGid, kGidKeys, "address"},
    Form{"fail", FaultKind::kFail, kFailKeys, "verb"},
    Form{"slow", FaultKind::kSlow, kSlowKeys, "by", kWithoutEnd},
    Form{"registration", FaultKind::kRegistration, kRegistrationKeys, {}},
    Form{"clear", FaultKind::kClear, Keys{}, {}},
};

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
  return list.empty() ? "nothing" : list;
}

// Reads one key into the clause. Returns the reason when it is malformed.
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
  clause.count = kNotGiven;
  if (text.starts_with("seed=")) {
    clause.kind = FaultKind::kSeed;
    if (kSeedValue.read(text.substr(5), clause)) return clause;
    return refusal(text, "seed takes a number");
  }
  std::string_view rest = text;
  const std::string_view name = cut(rest, kBlanks);
  const auto* form = std::find_if(kForms.begin(), kForms.end(), [&](const Form& f) { return f.name == name; });
  if (form == kForms.end()) {
    return refusal(
        text, "no such fault; the faults are " + names(kForms, [](const Form& f) { return f.name; }) + ", and seed=N");
  }
  clause.kind = form->kind;
  bool has_required = form->required.empty();
  while (!rest.empty()) {
    const std::string_view word = cut(rest, kBlanks);
    if (word.empty()) continue;
    if (std::optional<std::string> wrong = read_word(*form, word, clause)) return refusal(text, *wrong);
    if (word.substr(0, word.find('=')) == form->required) has_required = true;
  }
  if (!has_required) return refusal(text, std::string(form->required) + "= is needed");
  if (clause.kind == FaultKind::kSlow && clause.calls == 0) clause.calls = kControlCalls;
  if (clause.count == kNotGiven) clause.count = clause.rate > 0 ? kWithoutEnd : form->count;
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
