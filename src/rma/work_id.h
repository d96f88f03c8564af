// The wr_id of a work request: the address of its request, and a bit for a work request of its own, of a request that
// was held back. Without that bit it is the only signalled one, whose completion ends the request.
#pragma once

#include <cstdint>

namespace verbatim::rma {

struct Request;

struct WorkId {
  static constexpr std::uint64_t kPiece = 0x1;  // a request lies at a multiple of 8
  static constexpr std::uint64_t kLast = 0x2;   // piece of the request

  static std::uint64_t make(const Request& request) { return reinterpret_cast<std::uint64_t>(&request); }
  static std::uint64_t make_piece(const Request& request, bool last) {
    return make(request) + kPiece + (last ? kLast : 0);
  }
  static Request& request(std::uint64_t id) { return *reinterpret_cast<Request*>(id & ~(kPiece | kLast)); }
  static bool is_piece(std::uint64_t id) { return (id & kPiece) != 0; }
  static bool is_last_piece(std::uint64_t id) { return (id & kLast) != 0; }
};

}  // namespace verbatim::rma
