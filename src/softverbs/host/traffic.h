// What passes through the ports, as the counters in sysfs report it. Computed from the counters of posted requests, so
// that the data path counts nothing for it.
#pragma once

#include "softverbs/host/layout.h"

namespace verbatim::softverbs {

// Adds the requests of one QP, at the port of its device and at the port of its peer. The bytes of a QP that has posted
// READs and other requests are divided by the number of requests.
void add_traffic(HostTraffic& sum, const SharedQp& qp);

// Adds what all QPs of a process have posted, including destroyed QPs.
void add_traffic(HostTraffic& sum, const Segment& segment);

}  // namespace verbatim::softverbs
