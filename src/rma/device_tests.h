// What RMA tries before it relies on a device, with QPs of the port that are connected to each other, because the
// attributes do not say it.
#pragma once

#include <span>

#include "base/config.h"
#include "base/result.h"
#include "net/transfer/memory.h"
#include "verbs/device.h"
#include "verbs/port.h"

namespace verbatim::rma {

// Whether a device says, when a link has failed, what it has executed. A signal that is posted again on another port
// must not count twice, and one that was not executed must not be lost: so the other end asks the QP, which is in ERR
// then, which packet it expects. Drivers differ in what they answer, and some cannot use a QP again. Found out once for
// each device: about 0.1 s. Both
// kWrong and kNotKnown are logged. kNotKnown: the port does not work now.
ExecutedReport executed_report(const Port& port, const Config& config);

// Whether all ports execute atomics on memory of a GPU, which signals need: a device may announce atomics, and a PCIe
// switch on the way to the GPU refuse them. Compares the first word, and does not change it. An error has been logged;
// a port that does not work now is none. `working`: the ports for which it is known, one bit each.
Status check_atomics(std::span<const Port* const> ports, const MrRequest& request, const MemoryHandle& memory,
                     const Config& config, std::uint32_t& working);

}  // namespace verbatim::rma
