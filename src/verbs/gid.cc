#include "verbs/gid.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "verbs/errors.h"

namespace verbatim {
namespace {

constexpr int kMaxGidEntries = 256;

// An address handle has 8 bits for the GID index (ibv_global_route::sgid_index).
unsigned usable_entries(const ibv_port_attr& port) {
  return static_cast<unsigned>(std::clamp(port.gid_tbl_len, 0, kMaxGidEntries));
}

bool is_empty(const ibv_gid& gid) {
  return std::all_of(std::begin(gid.raw), std::end(gid.raw), [](std::uint8_t byte) { return byte == 0; });
}

in6_addr address_of(const ibv_gid& gid) {
  in6_addr address;
  std::memcpy(&address, gid.raw, sizeof address);
  return address;
}

// A higher rank is preferred. Routers do not forward link-local addresses, of IPv4 or of IPv6.
int address_rank(const ibv_gid& gid, int family) {
  const in6_addr address = address_of(gid);
  const bool ipv4 = IN6_IS_ADDR_V4MAPPED(&address);
  const bool ipv4_link_local = ipv4 && gid.raw[12] == 169 && gid.raw[13] == 254;
  if (IN6_IS_ADDR_LINKLOCAL(&address) || ipv4_link_local) return 0;
  return ipv4 == (family == AF_INET) ? 2 : 1;
}

// The version that is asked for, then an unknown one, then the other.
int version_rank(RoceVersion version, unsigned preferred) {
  if (version == RoceVersion::kUnknown) return 1;
  return version == (preferred == 1 ? RoceVersion::kV1 : RoceVersion::kV2) ? 2 : 0;
}

RoceVersion version_of(std::uint32_t gid_type) {
  if (gid_type == IBV_GID_TYPE_ROCE_V2) return RoceVersion::kV2;
  return gid_type == IBV_GID_TYPE_ROCE_V1 ? RoceVersion::kV1 : RoceVersion::kUnknown;
}

// The RoCE version of a table entry from sysfs, for a libibverbs without ibv_query_gid_ex.
RoceVersion version_from_sysfs(const ibv_context* context, unsigned port_num, unsigned index) {
  std::ifstream file(std::string(context->device->ibdev_path) + "/ports/" + std::to_string(port_num) +
                     "/gid_attrs/types/" + std::to_string(index));
  std::string type;
  if (!std::getline(file, type)) return RoceVersion::kUnknown;
  return type.find("v2") != std::string::npos ? RoceVersion::kV2 : RoceVersion::kV1;
}

// nullopt: the entry cannot be read or is empty.
std::optional<GidEntry> read_gid(const Verbs& verbs, ibv_context* context, std::uint8_t port_num, unsigned index) {
  if (verbs.query_gid_ex != nullptr) {
    ibv_gid_entry entry = {};
    if (check_errno("ibv_query_gid_ex", verbs.query_gid_ex(context, port_num, index, &entry, 0, sizeof entry))) {
      if (is_empty(entry.gid)) return std::nullopt;
      return GidEntry{index, entry.gid, version_of(entry.gid_type)};
    }
  }
  ibv_gid gid = {};
  if (verbs.query_gid(context, port_num, static_cast<int>(index), &gid) != 0 || is_empty(gid)) return std::nullopt;
  return GidEntry{index, gid, version_from_sysfs(context, port_num, index)};
}

// Members are compared in this order; an entry that has more is preferred.
struct GidRank {
  bool filled;
  bool in_range;
  int version;
  int address;
  unsigned inverted_index;

  auto operator<=>(const GidRank&) const = default;
};

GidRank rank_of(const GidEntry& entry, const GidSetting& setting) {
  return {.filled = !is_empty(entry.gid),
          .in_range = setting.range && setting.range->contains(address_of(entry.gid)),
          .version = version_rank(entry.version, setting.roce_version),
          .address = address_rank(entry.gid, setting.family),
          .inverted_index = ~entry.index};
}

// Why an entry of the rank `better` is preferred to one of the rank `other`.
std::string why_preferred(const GidRank& better, const GidRank& other, const GidSetting& setting) {
  if (better.in_range != other.in_range) return "its address is in VERBATIM_ADDR_RANGE";
  if (better.version != other.version) return "RoCE v" + std::to_string(setting.roce_version) + " is preferred";
  if (other.address == 0 && better.address != 0) return "its address is routable";
  if (better.address != other.address) return setting.family == AF_INET ? "IPv4 is preferred" : "IPv6 is preferred";
  return "it is the first of equals";
}

}  // namespace

// RoCE v2 sends IPv4 or IPv6 packets between the addresses that the GIDs are. The kernel resolves no address of one
// family from the other's.
const char* gid_mismatch(const GidEntry& one, const GidEntry& other) {
  if (is_empty(one.gid) || is_empty(other.gid)) return nullptr;
  if (one.version != other.version && one.version != RoceVersion::kUnknown && other.version != RoceVersion::kUnknown) {
    return "one end uses RoCE v1, the other RoCE v2";
  }
  const in6_addr first = address_of(one.gid);
  const in6_addr second = address_of(other.gid);
  if (IN6_IS_ADDR_V4MAPPED(&first) == IN6_IS_ADDR_V4MAPPED(&second)) return nullptr;
  return "one end has an IPv4 GID, the other an IPv6 GID";
}

std::optional<GidEntry> best_gid(std::span<const GidEntry> entries, const GidSetting& setting) {
  const auto best = std::max_element(entries.begin(), entries.end(), [&](const GidEntry& a, const GidEntry& b) {
    return rank_of(a, setting) < rank_of(b, setting);
  });
  if (best == entries.end() || is_empty(best->gid)) return std::nullopt;
  return *best;
}

std::vector<GidEntry> read_gid_table(const Verbs& verbs, ibv_context* context, std::uint8_t port_num,
                                     const ibv_port_attr& port) {
  std::vector<GidEntry> entries;
  for (unsigned index = 0; index < usable_entries(port); ++index) {
    if (const auto entry = read_gid(verbs, context, port_num, index)) entries.push_back(*entry);
  }
  return entries;
}

Result<GidEntry> choose_gid(const Verbs& verbs, ibv_context* context, const char* device, std::uint8_t port_num,
                            const ibv_port_attr& port, const GidSetting& setting) {
  const unsigned table_entries = usable_entries(port);
  if (port.link_layer != IBV_LINK_LAYER_ETHERNET) {
    const auto routable =
        setting.flid_index < table_entries ? read_gid(verbs, context, port_num, setting.flid_index) : std::nullopt;
    if (routable && flid(routable->gid) != 0) return *routable;
    return read_gid(verbs, context, port_num, 0).value_or(GidEntry{});
  }
  if (const std::optional<unsigned> index = setting.for_device(device)) {
    const auto named = *index < table_entries ? read_gid(verbs, context, port_num, *index) : std::nullopt;
    if (!named) return Error{ErrorKind::kUsage, ENODATA, "GID index"};
    return *named;
  }
  const auto best = best_gid(read_gid_table(verbs, context, port_num, port), setting);
  if (!best) return Error{ErrorKind::kUsage, ENOENT, "GID table"};
  return *best;
}

bool is_gone(const Verbs& verbs, ibv_context* context, std::uint8_t port_num, const GidEntry& entry) {
  ibv_gid now{};
  return verbs.query_gid(context, port_num, static_cast<int>(entry.index), &now) == 0 &&
         std::memcmp(now.raw, entry.gid.raw, sizeof now.raw) != 0;
}

Result<GidEntry> confirm_gid(const Verbs& verbs, ibv_context* context, const char* device, std::uint8_t port_num,
                             const ibv_port_attr& port, const GidSetting& setting, const GidEntry& known) {
  const auto now = read_gid(verbs, context, port_num, known.index);
  const auto is_known = [&](const GidEntry& entry) {
    return std::memcmp(entry.gid.raw, known.gid.raw, sizeof entry.gid.raw) == 0 && entry.version == known.version;
  };
  if (now && is_known(*now)) return known;
  // A port that was down may have its addresses at other indices, also than at the one that a setting names.
  const std::vector<GidEntry> entries = read_gid_table(verbs, context, port_num, port);
  const auto moved = std::find_if(entries.begin(), entries.end(), is_known);
  if (moved != entries.end()) return *moved;
  return choose_gid(verbs, context, device, port_num, port, setting);
}

std::string why_chosen(const GidEntry& chosen, std::span<const GidEntry> entries, const char* device,
                       const ibv_port_attr& port, const GidSetting& setting) {
  if (port.link_layer != IBV_LINK_LAYER_ETHERNET) {
    return flid(chosen.gid) != 0 && chosen.index == setting.flid_index ? "InfiniBand: it has an FLID"
                                                                       : "InfiniBand: entry 0 unless one has an FLID";
  }
  if (setting.for_device(device)) return std::string("set by ") + setting.variable;
  const GidRank rank = rank_of(chosen, setting);
  std::vector<GidEntry> others;
  std::copy_if(entries.begin(), entries.end(), std::back_inserter(others),
               [&](const GidEntry& entry) { return entry.index != chosen.index; });
  const std::optional<GidEntry> second = best_gid(others, setting);
  if (!second) return "it is the only one";
  return why_preferred(rank, rank_of(*second, setting), setting);
}

std::uint16_t subnet(const ibv_gid& gid) {
  return static_cast<std::uint16_t>(gid.raw[6] << 8 | gid.raw[7]);
}

std::uint16_t flid(const ibv_gid& gid) {
  return static_cast<std::uint16_t>(gid.raw[4] << 8 | gid.raw[5]);
}

std::string to_string(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  return text;
}

const char* to_string(RoceVersion version) {
  return version == RoceVersion::kV2 ? "RoCE v2" : version == RoceVersion::kV1 ? "RoCE v1" : "";
}

std::string to_string(std::span<const GidEntry> entries) {
  constexpr std::size_t kMaxEntries = 8;  // a log line is at most 1,024 bytes long
  std::string text;
  for (const GidEntry& entry : entries.first(std::min(entries.size(), kMaxEntries))) {
    text.append(text.empty() ? "" : ", ").append(std::to_string(entry.index)).append(" ").append(to_string(entry.gid));
    const std::string version = to_string(entry.version);
    if (!version.empty()) text.append(" (").append(version).append(")");
  }
  return entries.size() > kMaxEntries ? text + ", ..." : text;
}

}  // namespace verbatim
