// The registrations of a rank's cache memory. If the plugin's registrations are valid for all comms, each interval is
// registered once for both families and all connections, otherwise once for each comm.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <vector>

#include "memory/memory.h"
#include "nccl/types.h"
#include "ranks/loaded_plugin.h"
#include "workload/kv/intervals.h"

namespace verbatim::kv {

class Registrations {
 public:
  // `device` is that of all connections of this rank. Shared registrations are made on a connection of this rank to
  // itself that carries no data, so that they do not end when a family's connection fails.
  Registrations(ranks::LoadedPlugin& plugin, int device, const memory::Memory& memory, const IntervalSet& intervals);

  // Returns one handle for each interval, for use on `comm`. May be called from any thread. Throws Failure.
  std::vector<void*> attach(void* comm);
  // Must be called before `comm` is closed.
  void detach(void* comm, const std::vector<void*>& mhandles);
  // Must be called when all other comms are closed.
  void release();

  std::size_t calls() const { return calls_; }  // number of regMr calls
  bool shared() const { return shared_; }

 private:
  std::vector<void*> register_all(void* comm);
  void connect_to_self();

  ranks::LoadedPlugin& plugin_;
  const int device_;
  const memory::Memory& memory_;
  const IntervalSet& intervals_;
  const bool shared_;
  std::array<char, nccl::kNetHandleMaxBytes> handle_{};
  void* send_comm_ = nullptr;
  void* recv_comm_ = nullptr;
  std::vector<void*> mhandles_;  // only when shared
  std::atomic<std::size_t> calls_{0};
};

}  // namespace verbatim::kv
