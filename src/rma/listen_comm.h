// A listen of RMA. Its connect requests come to the listener of the process.
#pragma once

#include <cstdint>

#include "base/unique_fd.h"
#include "channel/listener.h"
#include "verbs/port.h"
#include "wire/handle.h"

namespace verbatim::rma {

class Instance;

struct ListenComm {
  ListenComm(Instance& instance, Listener& process_listener, const Port& its_port)
      : owner(&instance), listener(process_listener), port(&its_port) {}
  ~ListenComm() { listener.remove(id); }
  ListenComm(const ListenComm&) = delete;
  ListenComm& operator=(const ListenComm&) = delete;

  Instance* const owner;
  Listener& listener;
  const Port* const port;
  wire::Handle handle;
  wire::ListenId id;
  std::uint64_t attempt = 0;  // a random number: of the next hello
  UniqueFd arrival;           // an eventfd: a rank has connected
};

}  // namespace verbatim::rma
