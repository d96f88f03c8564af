// The cache memory of a rank as the plugin knows it: each interval registered once for both families and all their
// connections, where the plugin's registrations are good on every comm, and once a comm where they are not.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <vector>

#include "nccl/types.h"
#include "ranks/loaded_plugin.h"
#include "workload/kv/intervals.h"

namespace verbatim::kv {

class Registrations {
 public:
  // `device`: that of all this rank's connections. The registrations that all share are made through a connection of
  // this rank to itself, which carries nothing: no family's connection may take them with it when it fails.
  Registrations(ranks::LoadedPlugin& plugin, int device, const IntervalSet& memory);

  // One handle for each interval, for use on `comm`. From any thread. Throws Failure.
  std::vector<void*> attach(void* comm);
  // Before `comm` is closed.
  void detach(void* comm, const std::vector<void*>& mhandles);
  // When all comms are closed.
  void release();

  std::size_t calls() const { return calls_; }  // of regMr
  bool shared() const { return shared_; }

 private:
  std::vector<void*> register_all(void* comm);
  void connect_to_self();

  ranks::LoadedPlugin& plugin_;
  const int device_;
  const IntervalSet& memory_;
  const bool shared_;
  std::array<char, nccl::kNetHandleMaxBytes> handle_{};
  void* send_comm_ = nullptr;
  void* recv_comm_ = nullptr;
  std::vector<void*> mhandles_;  // when shared
  std::atomic<std::size_t> calls_{0};
};

}  // namespace verbatim::kv
