// Parses VERBATIM_HCA (NCCL_IB_HCA), which selects ports and sets their rail and plane.
//   [^][=]name[:port[:rail[:plane]]],...
// A name selects every device whose name starts with it; after `=`, only the device of exactly this name. Without a
// port number all ports of the device are selected. After `^` all ports are used except those in the list. An empty
// port field means any port, an empty rail field means no rail.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace verbatim {

struct HcaMatch {
  bool selected = false;
  int rail_id = -1;  // -1: unset
  int plane_id = -1;
};

class HcaFilter {
 public:
  // Malformed text (a port that is not a number, too many fields, no name) is ErrorKind::kUsage; nothing is logged.
  static Result<HcaFilter> parse(std::string_view text);

  // The first matching entry decides. An empty filter selects all ports.
  HcaMatch match(std::string_view device, std::uint8_t port_num) const;

  // False: no port of the device can be selected, so the device need not be opened.
  bool may_select(std::string_view device) const;

 private:
  struct Entry {
    std::string name;
    int port = -1;  // -1: any
    int rail_id = -1;
    int plane_id = -1;
  };

  bool names(const Entry& entry, std::string_view device) const;

  std::vector<Entry> entries_;
  bool exclude_ = false;
  bool exact_ = false;
};

}  // namespace verbatim
