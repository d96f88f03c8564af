// One RC QP on the first device, which writes into the memory area of the other process. Both processes of the
// benchmark have one for each engine thread; one thread uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "verbs/device_inventory.h"
#include "verbs/qp.h"

namespace verbatim::bench {

// The area and QP of one process, sent to the other over a socket as plain bytes.
struct RemoteArea {
  QpAddress qp;
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
};

class Endpoint {
 public:
  // Opens the device and registers [area, area + bytes). The area must outlive the endpoint.
  static Result<Endpoint> open(std::byte* area, std::size_t bytes);

  RemoteArea local() const;
  Status connect(const RemoteArea& remote);

  // Writes [offset, offset + bytes) of this area to `remote_offset` of the other one. `inlined`: with inline data if it
  // fits.
  Status write(std::size_t offset, std::size_t remote_offset, std::size_t bytes, bool signalled, bool inlined);

  // Polls once and returns the number of completions, 0 or 1. Fails when a write has failed.
  Result<unsigned> poll();

  const char* device_name() const { return port_->name.c_str(); }

  static constexpr unsigned kDepth = 64;  // the most outstanding writes

 private:
  Endpoint() = default;

  std::unique_ptr<const Verbs> verbs_;
  std::shared_ptr<const DeviceSurvey> inventory_;
  const Port* port_ = nullptr;
  std::byte* area_ = nullptr;
  UniqueMr mr_;
  UniqueCq cq_;
  RcQp qp_;
  RemoteArea remote_;
};

}  // namespace verbatim::bench
