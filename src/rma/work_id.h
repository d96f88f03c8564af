// The wr_id of a work request: the slot of its request, the index of its queue, how many entries of the send queue its
// completion frees, and whether it is the last of its request.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim::rma {

struct WorkId {
  static constexpr std::uint64_t kLast = std::uint64_t{1} << 48;

  static std::uint64_t make(std::uint32_t slot, std::uint32_t queue) { return slot | std::uint64_t{queue} << 16; }
  static std::uint64_t with_entries(std::uint64_t id, std::uint32_t entries) {
    return id | std::uint64_t{entries} << 40;
  }
  static std::size_t slot(std::uint64_t id) { return id & 0xffff; }
  static std::size_t queue(std::uint64_t id) { return id >> 16 & 0xffffff; }
  static std::uint32_t entries(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 40 & 0xff); }
  static bool is_last(std::uint64_t id) { return (id & kLast) != 0; }
};

}  // namespace verbatim::rma
