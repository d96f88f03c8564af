// The hello that each end sends to the other in the handshake: identity, devices and QPs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "wire/handle.h"

namespace verbatim::wire {

// Optional features. The connecting side sends those that it wants and supports; the accepting side replies with those
// of them that the connection uses.
enum Capability : std::uint32_t { kAtomicCompletion = 0x1 };

// One device of one end.
struct HelloDevice {
  std::uint64_t guid = 0;
  std::array<std::uint8_t, 16> gid{};
  std::uint32_t control_rkey = 0;  // of this end's control memory on this device
  std::uint32_t max_message_bytes = 0;
  std::uint16_t lid = 0;
  std::uint8_t link_layer = 0;  // IBV_LINK_LAYER_*
  std::uint8_t mtu = 0;         // enum ibv_mtu: of the port
  std::uint8_t port = 0;
  std::uint8_t gid_index = 0;
  std::uint8_t responder_reads = 0;  // READs and atomics that a QP can have outstanding as responder
  std::string name;                  // of the verbs device, for log lines
};

struct HelloQp {
  std::uint32_t number = 0;
  std::uint8_t device = 0;  // index into Hello::devices
  bool has_ece = false;
  std::array<std::uint32_t, 3> ece{};  // vendor_id, options, comp_mask
};

// The body of kConnect and kAccept.
struct Hello {
  Secret secret{};  // of the listen comm: proves that the connecting side has its handle
  PeerIdentity identity;
  std::uint64_t attempt = 0;  // connecting side: random, one for each connect; a hello that repeats it is a replay
  std::uint64_t control_address = 0;  // connecting side: its CTS ring; accepting side: its CompletionRecord
  std::uint32_t capabilities = 0;     // Capability bits
  std::int16_t traffic_class = -1;    // connecting side: the communicator's, -1 when it has none
  std::string host;                   // host name, for log lines
  std::uint32_t pid = 0;              // for log lines
  std::vector<HelloDevice> devices;   // 1 to kMaxDevices
  std::vector<HelloQp> qps;           // 1 to kMaxQps; QP i of one end is connected to QP i of the other
};

}  // namespace verbatim::wire
