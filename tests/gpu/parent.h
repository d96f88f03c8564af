// Messages between a rank and its parent: one struct per message on a SOCK_SEQPACKET socket.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace verbatim::gpu {

struct Report {
  enum class Kind : std::uint32_t {
    kId,               // rank 0's id of a new communicator; the parent passes it to the others
    kBarrier,          // the parent sends it back to all once every rank has sent it
    kRow,              // an operation at one size
    kScenario,         // a scenario
    kAboutToBeKilled,  // this process is about to be killed: the parent starts another in its place
    kError,
    kDone,
  };
  Kind kind;
  std::uint32_t index;      // kRow: into kOperations, kScenario: into kScenarios
  std::uint64_t count;      // kRow: elements of the buffer
  double cpu_microseconds;  // kRow: of NCCL's progress threads, per call
  double microseconds;      // kRow: of one call, mean of the timed calls; kScenario: of the whole scenario
  double abort_seconds;     // kScenario: the longest ncclCommAbort
  std::uint64_t wrong;      // kRow, kScenario: wrong elements of all checked calls
  std::uint64_t checked;    // kRow, kScenario: elements compared
  ncclUniqueId id;          // kId
  char text[256];           // kScenario, kError, kDone: one line
};
static_assert(std::is_trivially_copyable_v<Report>);

Report make_report(Report::Kind kind, const std::string& text = {});

// A rank's connection to its parent.
class Parent {
 public:
  explicit Parent(int socket) : socket_(socket) {}

  bool try_send(const Report& report);
  void send(const Report& report);
  // Rank 0 creates the id (and hosts NCCL's bootstrap from then on); the other ranks wait for the id.
  ncclUniqueId exchange_id(int rank);
  // Returns when every rank has called it.
  void barrier();

 private:
  Report receive(Report::Kind kind);

  int socket_;
};

}  // namespace verbatim::gpu
