// Whether a device says, when a link has failed, what it has executed. A signal that is posted again on another port
// must not count twice, and one that was not executed must not be lost: so the other end asks the QP, which is in ERR
// then, which packet it expects. Drivers differ in what they answer, and some cannot use a QP again.
#pragma once

#include "base/config.h"
#include "verbs/device.h"
#include "verbs/port.h"

namespace verbatim::rma {

// Found out once for each device, with two QPs of the port that are connected to each other: about 0.1 s. kWrong is
// logged. kNotKnown: the port does not work now.
ExecutedReport executed_report(const Port& port, const Config& config);

}  // namespace verbatim::rma
