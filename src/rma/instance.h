// What one init of NCCL's RMA table makes: it keeps the devices open, and owns the listens, communicators and
// registrations. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "net/context/context.h"
#include "rma/coll_comm.h"
#include "rma/listen_comm.h"
#include "wire/handle.h"

namespace verbatim::rma {

class Instance {
 public:
  // Reads the configuration and, the first time in the process, opens the devices. kUsage: VERBATIM_RMA=0, or no device
  // has what RMA needs. An error has been logged.
  static Result<Instance*> open();
  // With everything that the caller has not closed. Waits for ranks that have not closed, VERBATIM_CLOSE_TIMEOUT_MS at
  // most.
  static void close(Instance* instance);
  // For the unloading of the library.
  static void close_all();

  Result<ListenComm*> listen(std::size_t device, std::span<std::uint8_t, wire::kHandleBytes> handle);
  // Collective; `handles` are those of all ranks, 128 bytes each. An error has been logged.
  Result<CollComm*> connect(ListenComm& listen, void* const* handles, int ranks, int rank);
  void close(ListenComm& listen);
  void close(CollComm& comm);

 private:
  struct Closing {
    std::unique_ptr<CollComm> comm;
    std::uint64_t deadline_ns = 0;
  };

  explicit Instance(Context& context);
  ~Instance();
  // Closes what the caller has not closed, and waits for the other ranks.
  void end_communicators();
  LanePorts lane_ports(const Port& port) const;
  Error log_listen_failure(const Error& error) const;
  void remove_closed() noexcept;

  Context& context_;
  const ProcessParts process_;
  const PeerChannel::Process channels_;
  Registrations<Memory> memories_;  // end after the communicators
  const CollSettings settings_;
  Mutex mutex_;
  std::map<const void*, std::unique_ptr<ListenComm>> listens_ VERBATIM_GUARDED_BY(mutex_);
  std::map<const void*, std::unique_ptr<CollComm>> comms_ VERBATIM_GUARDED_BY(mutex_);
  std::vector<Closing> closing_ VERBATIM_GUARDED_BY(mutex_);
  std::uint32_t listens_made_ VERBATIM_GUARDED_BY(mutex_) = 0;
};

}  // namespace verbatim::rma
