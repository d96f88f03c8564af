// The control verbs in memory, for unit tests: devices that a test describes, failures that it asks for, and a record
// of what was registered and set. It moves no data (softverbs does). One instance at a time; the verbs may be called
// from any thread, but devices and failures are set up before.
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
  int dmabuf_errno = EOPNOTSUPP;  // what reg_dmabuf_mr answers; 0: it registers any fd but -1, which is EBADF
  std::uint32_t max_inline = 64;
  int ece_errno = EOPNOTSUPP;  // of query_ece and set_ece
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

  // Verb without "ibv_" -> errno with which every call of it fails.
  std::map<std::string, int> failures;

  // What create_qp fails with, 0: it does not. Unset: as `failures` says.
  std::function<int()> on_create_qp;

  // The number of a new QP from the count of those made before. Unset: rising.
  std::function<std::uint32_t(std::uint32_t)> qp_number;

  // Called by reg_mr, reg_mr_iova2 and reg_dmabuf_mr before they answer.
  std::function<void()> on_register;

  struct Registration {
    std::string verb;
    std::uintptr_t address = 0;  // of a dma-buf: the iova
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
  std::vector<ibv_qp_init_attr> created_qps() const;  // as asked for, refused ones included
  std::optional<ibv_ece> ece_set;

  // Objects that are alive, by name: "context", "pd", "mr", "cq", "qp".
  int live(const std::string& object) const;
  int calls(const std::string& verb) const;

  // For the verbs themselves.
  std::vector<std::unique_ptr<FakeDevice>>& devices() { return devices_; }
  bool fails(const char* verb);  // counts the call; sets errno when it is to fail
  void count(const char* object, int change);
  void record(Registration registration);
  void record(Modification modification);
  void record(const ibv_qp_init_attr& wanted);
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
