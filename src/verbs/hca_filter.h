// VERBATIM_HCA (NCCL_IB_HCA): which ports are used, and their rail and plane.
//   [^][=]name[:port[:rail[:plane]]],...
// A name selects every device whose name starts with it, after `=` the device of exactly this name; no port means every
// port. `^` in front uses everything but what the list selects. An empty port or rail stands for "any" and "unset".
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
  // Malformed (a port that is no number, too many fields, no name): ErrorKind::kUsage, and nothing is logged.
  static Result<HcaFilter> parse(std::string_view text);

  // The first entry that matches decides. An empty filter selects everything.
  HcaMatch match(std::string_view device, std::uint8_t port_num) const;

  // Whether any port of the device can be selected: others need not be opened.
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
