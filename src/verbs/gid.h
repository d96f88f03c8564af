// Chooses the entry of a port's GID table that connections use.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/result.h"
#include "verbs/verbs.h"

namespace verbatim {

enum class RoceVersion : std::uint8_t { kV1, kUnknown, kV2 };

struct GidEntry {
  unsigned index = 0;
  ibv_gid gid = {};
  RoceVersion version = RoceVersion::kUnknown;
};

// What differs between the GIDs of two RoCE ports so that their QPs cannot exchange packets, a static text. nullptr:
// nothing that is known.
const char* gid_mismatch(const GidEntry& one, const GidEntry& other);

// The entry from which a peer is most likely reachable. Preferred are, in this order: the address range and the RoCE
// version of `setting`, a routable address of its family, another routable address, the lowest index. Empty (all-zero)
// entries are ignored; nullopt when all are empty. A pure function.
std::optional<GidEntry> best_gid(std::span<const GidEntry> entries, const GidSetting& setting = {});

// The non-empty entries of a RoCE port, as far as choose_gid looks at them. An entry that cannot be read is skipped,
// because tables can have gaps.
std::vector<GidEntry> read_gid_table(const Verbs& verbs, ibv_context* context, std::uint8_t port_num,
                                     const ibv_port_attr& port);

// The entry for this port; logs nothing. RoCE: the index that `setting` has for `device` (error kUsage with ENODATA
// when that entry is empty or cannot be read), else best_gid of the table (error kUsage with ENOENT when there is
// none). InfiniBand, as in NCCL: `setting.flid_index` if that entry has an FLID, else index 0. LIDs are the addresses
// there, and GIDs are needed between subnets only.
Result<GidEntry> choose_gid(const Verbs& verbs, ibv_context* context, const char* device, std::uint8_t port_num,
                            const ibv_port_attr& port, const GidSetting& setting);

// For people: why choose_gid takes `chosen` of the port's `entries`, with the same arguments.
std::string why_chosen(const GidEntry& chosen, std::span<const GidEntry> entries, const char* device,
                       const ibv_port_attr& port, const GidSetting& setting);

// Whether the table has another GID at the index of this entry now, or none.
bool is_gone(const Verbs& verbs, ibv_context* context, std::uint8_t port_num, const GidEntry& entry);

// The entry of the table that has the GID of `known`, at its index or at another one; if there is none, calls
// choose_gid again. The addresses of a host can change, and move to other indices, while the process runs.
Result<GidEntry> confirm_gid(const Verbs& verbs, ibv_context* context, const char* device, std::uint8_t port_num,
                             const ibv_port_attr& port, const GidSetting& setting, const GidEntry& known);

// The parts of an InfiniBand GID that routing between subnets uses, in host byte order: the number of the subnet (the
// low 16 bits of the prefix), and the FLID, the LID by which routers know the port; 0: the GID has none.
std::uint16_t subnet(const ibv_gid& gid);
std::uint16_t flid(const ibv_gid& gid);

// "::ffff:10.0.0.1", "fe80::1": for log lines.
std::string to_string(const ibv_gid& gid);
// "RoCE v2", empty for an unknown version: for log lines.
const char* to_string(RoceVersion version);
// "0 fe80::1 (RoCE v1), 3 ::ffff:10.0.0.1 (RoCE v2)", cut after some: for log lines.
std::string to_string(std::span<const GidEntry> entries);

}  // namespace verbatim
