// The control verbs in memory, for unit tests: devices that the test describes, failures that it requests, and a record
// of registrations, QP creations and modifications. It transfers no data (softverbs does). Only one instance exists at
// a time. The verbs may be called from any thread; devices and failures must be set up before.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "verbs/verbs.h"

namespace verbatim {

struct FakePort {
  ibv_port_attr attributes = {};
  std::vector<std::optional<ibv_gid_entry>> gids;  // nullopt: the slot cannot be read
  int query_errno = 0;
};

struct FakeDevice {
  explicit FakeDevice(const std::string& name);

  // An ACTIVE port: 4 lanes at HDR (200 Gb/s), MTU 4096; RoCE with one RoCE v2 IPv4 GID, or InfiniBand with a LID.
  FakePort& add_roce_port();
  FakePort& add_infiniband_port();

  int open_errno = 0;
  ibv_device device = {};
  ibv_device_attr attributes = {};
  std::vector<FakePort> ports;
  bool extended = true;           // whether its context is a verbs_context with query_port
  int dmabuf_errno = EOPNOTSUPP;  // error of reg_dmabuf_mr; 0: any fd is registered, except -1, which is EBADF
  std::uint32_t max_inline = 64;
  int ece_errno = EOPNOTSUPP;  // error of query_ece and set_ece
};

ibv_gid_entry fake_gid(const std::string& ipv6, unsigned type);  // IBV_GID_TYPE_*

class FakeVerbs {
 public:
  FakeVerbs();
  ~FakeVerbs();
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  FakeDevice& add_device(const std::string& name);

  // The function table; optional verbs may be set to nullptr by the test.
  Verbs table;

  // Name of a verb without "ibv_" -> errno with which every call of this verb fails.
  std::map<std::string, int> failures;

  // Return the errno with which the verb fails; 0 when it does not fail. Unset: only `failures` decides.
  std::function<int()> on_create_qp;
  std::function<int()> on_modify_qp;

  // Returns the number of a new QP, given how many create_qp calls there were. Unset: increasing numbers.
  std::function<std::uint32_t(std::uint32_t)> qp_number;

  // Called at the start of reg_mr, reg_mr_iova2 and reg_dmabuf_mr.
  std::function<void()> on_register;

  struct Registration {
    std::string verb;
    std::uintptr_t address = 0;  // for a dma-buf: the iova
    std::size_t bytes = 0;
    unsigned access = 0;
    int fd = -1;
    std::uint64_t offset = 0;
    bool operator==(const Registration&) const = default;
  };
  std::vector<Registration> registrations() const;

  struct Modification {
    ibv_qp_attr attributes;
    int mask;
  };
  std::vector<Modification> modifications() const;
  std::vector<ibv_qp_init_attr> created_qps() const;  // the arguments of every create_qp call, also of failed ones
  std::optional<ibv_ece> ece_set;

  // Number of objects that exist, by kind: "context", "pd", "mr", "cq", "qp", "list".
  int live(const std::string& object) const;
  int calls(const std::string& verb) const;

  // Called by the fake verbs themselves.
  std::vector<std::unique_ptr<FakeDevice>>& devices() { return devices_; }
  bool fails(const char* verb);  // counts the call; sets errno when it must fail
  void count(const char* object, int change);
  void record(Registration registration);
  void record(Modification modification);
  void record(const ibv_qp_init_attr& attributes);
  static FakeVerbs& current();

 private:
  std::vector<std::unique_ptr<FakeDevice>> devices_;
  mutable std::mutex mutex_;
  std::map<std::string, int> live_;
  std::map<std::string, int> calls_;
  std::vector<Registration> registrations_;
  std::vector<Modification> modifications_;
  std::vector<ibv_qp_init_attr> created_qps_;
};

}  // namespace verbatim
