#include "net/connect/qp_dump.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/json.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "net/connect/qp_planner.h"

namespace verbatim {

void dump_qps(const std::string& file, const Comm& comm, const wire::PeerIdentity& self) {
  const Endpoint& endpoint = comm.endpoint();
  const EndpointPlacement& placement = endpoint.placement();
  const std::string peer = to_string(endpoint.remote().identity);
  std::string text;
  for (std::size_t i = 0; i < endpoint.qps().size(); ++i) {
    const EndpointQp& end = endpoint.qps()[i];
    text += json_object({json_field("pid", static_cast<std::uint64_t>(::getpid())),
                         json_field("device", endpoint.ports()[end.device]->name),
                         json_field("side", comm.kind() == CommKind::kSend ? "send" : "recv"),
                         json_field("traffic", placement.collective ? "collective" : "p2p"),
                         json_field("order", placement.order == QpOrder::kNative ? "native" : "staggered"),
                         json_field("self", to_string(self)), json_field("peer", peer),
                         json_field("connection", placement.connection), json_field("index", i),
                         json_field("qpn", end.qp->qp_num), json_field("flow_label", end.path.flow_label),
                         json_field("lag_port", end.lag_port), json_field("block", placement.block),
                         json_field("peers", placement.peers), json_field("position", placement.position(i))}) +
            "\n";
  }
  append_to_qp_dump(file, text);
}

void append_to_qp_dump(const std::string& file, const std::string& text) {
  // Others may write to its directory: no link of theirs is followed, and a FIFO does not block.
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const UniqueFd out(::open(file.c_str(), kFlags, S_IRUSR | S_IWUSR));
  struct stat status {};
  const bool is_open = out && ::fstat(out.get(), &status) == 0;
  const bool is_own = S_ISREG(status.st_mode) && status.st_uid == ::geteuid() && status.st_nlink == 1;
  if (is_open && is_own && ::write(out.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return;
  static std::atomic<bool> is_reported{false};
  if (is_reported.exchange(true)) return;
  const char* const why = is_open && !is_own ? "it is not a file of this user with one name" : std::strerror(errno);
  VERBATIM_WARN("VERBATIM_QP_DUMP: writing %s failed: %s. Next: choose a file that this process can write",
                file.c_str(), why);
}

}  // namespace verbatim
