#include "net/connect/qp_dump.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "base/unique_fd.h"
#include "net/connect/qp_planner.h"

namespace verbatim {
namespace {

std::string lines(const Comm& comm, const wire::PeerIdentity& self) {
  const Endpoint& endpoint = comm.endpoint();
  const EndpointPlacement& placement = endpoint.placement();
  const std::string peer = to_string(endpoint.remote().identity);
  std::string text;
  for (std::size_t i = 0; i < endpoint.qps().size(); ++i) {
    const EndpointQp& end = endpoint.qps()[i];
    const Port& port = *endpoint.ports()[end.device];
    char line[640];
    std::snprintf(line, sizeof line,
                  R"({"pid":%d,"device":"%s","side":"%s","traffic":"%s","order":"%s","self":"%s","peer":"%s",)"
                  R"("connection":%u,"index":%zu,"qpn":%u,"block":%u,"peers":%u,"position":%u})"
                  "\n",
                  ::getpid(), port.name.c_str(), comm.kind() == CommKind::kSend ? "send" : "recv",
                  placement.collective ? "collective" : "p2p",
                  placement.order == QpOrder::kNative ? "native" : "staggered", to_string(self).c_str(), peer.c_str(),
                  placement.connection, i, end.qp->qp_num, placement.block, placement.peers, placement.position(i));
    text += line;
  }
  return text;
}

}  // namespace

void dump_qps(const std::string& file, const Comm& comm, const wire::PeerIdentity& self) {
  const std::string text = lines(comm, self);
  const UniqueFd out(::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, S_IRUSR | S_IWUSR | S_IRGRP));
  if (out && ::write(out.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return;
  VERBATIM_WARN("VERBATIM_QP_DUMP: writing %s failed: %s. Next: choose a file that this process can write",
                file.c_str(), std::strerror(errno));
}

}  // namespace verbatim
