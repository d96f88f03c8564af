// The asynchronous events of a device: those that end connections, and those of its links and addresses.
#pragma once

#include <cstdint>

#include "net/monitor/connection_table.h"
#include "verbs/device.h"

namespace verbatim {

// Makes the descriptor of events non-blocking; `handler` is called once, and again after each read_device_events().
Status open_device_events(const Device& device, const EventHandler& handler);

// Reads all events of devices: sets comm events of the comms that they are about, logs what they mean. Called by the
// thread of the device's DeviceCalls: each of the verbs may hang. `index` of the device in
// ConnectionTable::earlier_failures.
void read_device_events(ConnectionTable& table, const Device& device, std::uint32_t index, const EventHandler& handler)
    VERBATIM_EXCLUDES(table.mutex);

}  // namespace verbatim
