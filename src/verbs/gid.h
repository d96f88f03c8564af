// Which entry of a port's GID table a connection uses.
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

enum class RoceVersion : std::uint8_t { kUnknown, kV1, kV2 };

struct GidEntry {
  unsigned index = 0;
  ibv_gid gid = {};
  RoceVersion version = RoceVersion::kUnknown;
};

// The entry that most likely reaches a peer: v2 over v1, IPv4-mapped over global IPv6 over link-local, then the lowest
// index; empty (all-zero) entries never. Pure. nullopt when nothing is usable.
std::optional<GidEntry> best_gid(std::span<const GidEntry> entries);

// The readable, non-empty entries of a RoCE port. A slot that cannot be read is skipped: tables have holes.
std::vector<GidEntry> read_gid_table(const Verbs& verbs, ibv_context* context, std::uint8_t port_num,
                                     unsigned table_entries);

// The entry for this port, nothing logged. On RoCE the index that `setting` names for `device` (kUsage, ENODATA when
// that entry is empty or cannot be read), else best_gid of the table (kUsage, ENOENT when nothing is usable). On
// InfiniBand always index 0, whatever is set, as NCCL does: LIDs address there and the GID serves across subnets only.
Result<GidEntry> choose_gid(const Verbs& verbs, ibv_context* context, const char* device, std::uint8_t port_num,
                            const ibv_port_attr& port, const GidIndexSetting& setting);

// `known` as long as its entry still holds that GID, else choose_gid anew: addresses change while a process runs.
Result<GidEntry> confirm_gid(const Verbs& verbs, ibv_context* context, const char* device, std::uint8_t port_num,
                             const ibv_port_attr& port, const GidIndexSetting& setting, const GidEntry& known);

// "::ffff:10.0.0.1", "fe80::1": for messages.
std::string to_string(const ibv_gid& gid);

}  // namespace verbatim
