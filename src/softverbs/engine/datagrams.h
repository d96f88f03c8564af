// Unreliable datagrams: address handles, and what the requester of a UD QP does instead of using a connection.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "softverbs/engine/attempt.h"
#include "softverbs/engine/context.h"
#include "softverbs/host/process_view.h"

namespace verbatim::softverbs {

struct Qp;

// The program's address handle. It does not change, so requests copy it.
struct Ah : ibv_ah {
  ibv_ah_attr path{};
};

// They implement the verbs of these names.
Result<Ah*> create_ah(Context& context, ibv_pd* pd, const ibv_ah_attr& path);
void destroy_ah(Ah& ah);
// Fills `path` with the address of the sender of a received datagram. `received`: the first bytes of the receive, at
// any alignment. 0, or an errno.
int init_ah_from_wc(const Context& context, std::uint8_t port, const ibv_wc& completion, const void* received,
                    ibv_ah_attr& path);

// Where a request goes.
struct DatagramAddress {
  ibv_ah_attr path;
  std::uint32_t qpn;
  std::uint32_t qkey;
  bool is_set;
};

// The part of a UD QP that other QPs do not have.
struct Datagrams {
  std::unique_ptr<DatagramAddress[]> addresses;       // at the same index as SendQueue::requests
  std::vector<std::shared_ptr<ProcessView>> targets;  // by slot of the registry: keeps their segments mapped
};

// Stores the address of the request at `slot`. 0, or EINVAL: no handle, or one of another protection domain.
int set_datagram_address(Qp& qp, std::uint32_t slot, ibv_ah* ah, std::uint32_t qpn, std::uint32_t qkey);

// Sends the request at `sent`. kLost: no QP has received it.
Attempt transmit_datagram(Qp& qp, const Packets& packets, Spans& local);

}  // namespace verbatim::softverbs
