// The wr_id of a work request: the address of its request, and in the last three bits what it is. Of 0 it is the only
// signalled one, whose completion ends the request. Pieces are work requests of their own, of a request that was held
// back. What only sets with several lanes post has numbers in place of the address.
#pragma once

#include <cstdint>
#include <optional>

namespace verbatim::rma {

struct Request;

struct WorkId {
  static constexpr std::uint64_t kPiece = 0x1;  // a request lies at a multiple of 8
  static constexpr std::uint64_t kLast = 0x2;   // piece of the request
  static constexpr std::uint64_t kProbe = kPiece + 0x4;
  static constexpr std::uint64_t kFlush = kPiece + kLast + 0x4;
  static constexpr std::uint64_t kKind = 0x7;

  static std::uint64_t make(const Request& request) { return reinterpret_cast<std::uint64_t>(&request); }
  static std::uint64_t make_piece(const Request& request, bool last) {
    return make(request) + kPiece + (last ? kLast : 0);
  }
  // Of one that is no piece.
  static Request& whole_request(std::uint64_t id) { return *reinterpret_cast<Request*>(id); }
  static Request& request(std::uint64_t id) { return *reinterpret_cast<Request*>(id & ~kKind); }
  static bool is_piece(std::uint64_t id) { return (id & kPiece) != 0; }
  static bool is_last_piece(std::uint64_t id) { return (id & kLast) != 0; }

  // The WRITE of 0 bytes on a lane that comes back.
  static std::uint64_t make_probe(std::uint32_t peer, std::uint32_t lane) {
    return std::uint64_t{peer} << 32 | lane << 3 | kProbe;
  }
  // The READ of a flush over one port.
  static std::uint64_t make_flush(std::uint32_t context, std::uint32_t slot, std::uint32_t port) {
    return std::uint64_t{slot} << 32 | context << 8 | port << 3 | kFlush;
  }
  static bool is_probe(std::uint64_t id) { return (id & kKind) == kProbe; }
  static bool is_flush(std::uint64_t id) { return (id & kKind) == kFlush; }
  static bool is_of_lanes(std::uint64_t id) { return (id & 0x4) != 0; }
  static std::uint32_t peer(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 32); }
  static std::uint32_t lane(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 3 & 0x1f); }
  // That of others is the lane of their queue.
  static std::optional<std::uint32_t> lane_of_flush(std::uint64_t id) {
    return is_flush(id) ? std::optional(lane(id)) : std::nullopt;
  }
  static std::uint32_t slot(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 32); }
  static std::uint32_t context(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 8 & 0xffffff); }
};

}  // namespace verbatim::rma
