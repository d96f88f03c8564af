// VERBATIM_QP_DUMP: a line of JSON for each QP of each established connection, so that the order can be checked.
#pragma once

#include <string>

#include "net/connect/qp_planner.h"
#include "net/transfer/comm.h"

namespace verbatim {

// Appends the QPs of `comm` to `path`, in which %p stands for the process id. Several processes may share a file. Logs
// a failure.
void dump_qps(const std::string& path, const Comm& comm, const PeerId& self);

}  // namespace verbatim
