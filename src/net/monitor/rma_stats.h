// What the contexts of an RMA communicator at one rank have carried, and their state: for the state sockets and the
// file of statistics (plugin/STATE.md). RMA fills them in.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"

namespace verbatim {

// A put with a signal is a put and a signal.
struct RmaCounts {
  std::uint64_t puts = 0;
  std::uint64_t signals = 0;
  std::uint64_t gets = 0;
  std::uint64_t flushes = 0;
  std::uint64_t put_bytes = 0;
  std::uint64_t get_bytes = 0;

  void add(const RmaCounts& other) {
    puts += other.puts;
    signals += other.signals;
    gets += other.gets;
    flushes += other.flushes;
    put_bytes += other.put_bytes;
    get_bytes += other.get_bytes;
  }
  std::string operations_json() const {
    return json_field("puts", puts) + "," + json_field("signals", signals) + "," + json_field("gets", gets) + "," +
           json_field("flushes", flushes);
  }
  std::string json() const {
    return json_object({operations_json(), json_field("put_bytes", put_bytes), json_field("get_bytes", get_bytes)});
  }
};

// The contexts of one createContext.
struct RmaStats {
  std::string json;     // {"number":..,"rank":..,"queues":[..]}
  RmaCounts completed;  // by all queues
};

}  // namespace verbatim
