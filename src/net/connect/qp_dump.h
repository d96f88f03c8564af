// VERBATIM_QP_DUMP: a line of JSON for each QP of each established connection, so that the order can be checked.
#pragma once

#include <string>

#include "net/transfer/comm.h"
#include "wire/handle.h"

namespace verbatim {

// Appends the QPs of `comm` to the file. Several processes may share a file. Logs a failure.
void dump_qps(const std::string& file, const Comm& comm, const wire::PeerIdentity& self);
// The same for lines that are made elsewhere.
void append_to_qp_dump(const std::string& file, const std::string& text);

}  // namespace verbatim
