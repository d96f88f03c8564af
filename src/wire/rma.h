// What the ranks of an RMA communicator send to each other over TCP: one connection for each pair of ranks.
//
//   connecting rank                       accepting rank
//        | ---- kConnect: RmaHello ----------> |   names the accepting rank's listen
//        | <--- kAccept: RmaHello ------------ |
//        | <--> kExchange: RmaExchange <-----> |   one each way for each collective call, numbered from 0
//        | <--> kRmaLane: RmaLane <----------> |   of a lane that has failed, or that comes back
//        | <--> kClose or kFailed <----------> |   the last message of either side (wire/notice.h)
//
// Each rank knows the handles of all ranks, and so all secrets: the MACs of the two hellos prove it. The messages have
// the header of wire/handshake.h, and those after the hellos cross a side channel like that of a connection, which is
// made again when it has ended with an error.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "wire/address.h"
#include "wire/handle.h"
#include "wire/handshake.h"
#include "wire/limits.h"

namespace verbatim::wire {

// Below it are the 4,096 QPs of the largest offer.
constexpr std::size_t kMaxRmaBodyBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxRmaContexts = 4096;
// The ports of a rank.
constexpr std::size_t kMaxRmaPorts = kMaxDevices;

struct RmaHello {
  ListenId listen = {};       // of the accepting rank
  std::uint64_t attempt = 0;  // as in Hello
  PublicKey key{};            // of the sender's process
  std::uint32_t ranks = 0;
  std::uint32_t rank = 0;               // of the sender
  std::uint32_t pid = 0;                // for log lines
  std::string host;                     // for log lines
  std::vector<Address> addresses = {};  // as in Hello
};

// The collective calls. kOffer and kConnected are those of createContext.
enum class RmaCall : std::uint8_t { kOffer = 1, kReady = 2, kRegister = 3, kConnected = 4 };

// kRepeats: a registration as dma-buf has failed, and this rank will call once more for the same exchange.
enum class RmaOutcome : std::uint8_t { kDone = 0, kFailed = 1, kRepeats = 2 };

// What one rank tells another in a collective call.
struct RmaExchange {
  RmaCall call = RmaCall::kReady;
  RmaOutcome outcome = RmaOutcome::kDone;
  std::uint32_t sequence = 0;
  std::vector<std::uint8_t> body;  // kDone: of the call; kFailed: the text of the failure
};

// One end of a lane: its port, and its QPs for the receiving rank, one for each context.
struct RmaOfferedLane {
  std::uint8_t roce_version = 0;  // enum RoceVersion
  HelloDevice device;
  std::vector<HelloQp> qps;
};

// kOffer: the lanes to the receiving rank; none if the rank is not spoken to.
struct RmaOffer {
  std::uint32_t contexts = 0;
  std::uint32_t rank_stride = 1;
  std::uint32_t psn = 0;  // of the first packet that each of these QPs expects
  std::vector<RmaOfferedLane> lanes;
};

// kRegister
struct RmaRegistration {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> rkeys;  // by port of the rank
};

// kFenced: the sender's QPs of a lane are in ERR, and execute nothing more. kOffered: they are in INIT again, to be
// connected anew. kConnected: they are in RTS.
enum class RmaLaneStep : std::uint8_t { kFenced = 0, kOffered = 1, kConnected = 2 };

struct RmaLane {
  RmaLaneStep step = RmaLaneStep::kFenced;
  std::uint32_t set = 0;  // which createContext, from 0
  std::uint32_t lane = 0;
  std::uint32_t round = 0;          // how often the lane has been connected anew
  std::vector<std::uint32_t> psns;  // by context: the PSN that the QP expects; kNoPsn: not known
  // kOffered: the address of the sender's port.
  std::uint16_t lid = 0;
  std::array<std::uint8_t, 16> gid{};
};
inline constexpr std::uint32_t kNoPsn = 0xffffffff;

std::vector<std::uint8_t> encode_rma_hello(MessageType type, const RmaHello& hello);
std::vector<std::uint8_t> encode_rma_exchange(const RmaExchange& exchange);
std::vector<std::uint8_t> encode_rma_lane(const RmaLane& lane);
std::vector<std::uint8_t> encode_rma_offer(const RmaOffer& offer);                       // a body
std::vector<std::uint8_t> encode_rma_registration(const RmaRegistration& registration);  // a body
std::vector<std::uint8_t> encode_rma_text(const std::string& text);                      // a body

// Bodies; kArgument when a field is out of range.
Result<RmaHello> decode_rma_hello(std::span<const std::uint8_t> body);
Result<RmaExchange> decode_rma_exchange(std::span<const std::uint8_t> body);
Result<RmaOffer> decode_rma_offer(std::span<const std::uint8_t> body);
Result<RmaLane> decode_rma_lane(std::span<const std::uint8_t> body);
Result<RmaRegistration> decode_rma_registration(std::span<const std::uint8_t> body);
std::string decode_rma_text(std::span<const std::uint8_t> body);

}  // namespace verbatim::wire
