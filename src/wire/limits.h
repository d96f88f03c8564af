// Constants that are the same at both ends of a connection.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbatim::wire {

constexpr std::uint16_t kProtocolVersion = 18;
constexpr std::size_t kMaxDevices = 8;       // devices of one fused NIC: NCCL's limit in v12
constexpr std::size_t kMaxAddresses = 8;     // of one process, for side channels
constexpr std::size_t kMaxQps = 128;         // of one connection, over all devices
constexpr std::uint32_t kMaxGroup = 8;       // members of a grouped receive
constexpr std::uint32_t kMaxInFlight = 256;  // outstanding members of one connection: NCCL's 32 requests x kMaxGroup

}  // namespace verbatim::wire
