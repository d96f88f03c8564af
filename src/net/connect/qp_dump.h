// VERBATIM_QP_DUMP: a line of JSON for each QP of each connection that stands, so that anybody can check the order.
#pragma once

#include <string>

#include "net/connect/qp_planner.h"
#include "net/transfer/comm.h"

namespace verbatim {

// Appends to `path`, in which %p stands for the process id; several processes may share a file. What fails is logged.
void dump_qps(const std::string& path, const Comm& comm, const PeerId& self);

}  // namespace verbatim
