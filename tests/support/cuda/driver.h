// The stand-in's state. One lock protects all of it; only the bytes of copies move without the lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "support/cuda/driver_api.h"

// Of the library only the functions of the driver and those for tests are visible.
#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

namespace standin {

class Memory;
class Worker;
struct Event;
struct Stream;

using Lock = std::unique_lock<std::mutex>;

constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;
constexpr int kMaxDevices = 8;

// A CUcontext points to one. It is never freed, so that the handle of a destroyed context is recognized.
struct Context {
  explicit Context(int device_number) : device(device_number) {}
  const int device;
  CUresult error = CUDA_SUCCESS;  // of a failed operation, or that the context is destroyed: all later calls return it
  std::set<int> peers;            // GPUs whose memory this context has access to
  std::shared_ptr<Stream> null_stream;
};

struct Device {
  Context* primary = nullptr;  // while it is retained
  unsigned retained = 0;
  int kernels = 0;
};

struct Driver {
  Driver();

  std::mutex mutex;
  std::condition_variable changed;  // a kernel or an operation has ended
  bool initialized = false;
  std::vector<Device> devices;
  bool peer_access = true;
  unsigned delay_us = 30;
  std::set<Context*> contexts;
  std::set<std::shared_ptr<Worker>> workers;
  std::map<CUstream, std::shared_ptr<Stream>> streams;
  std::map<CUevent, std::shared_ptr<Event>> events;
  const std::unique_ptr<Memory> memory;

  unsigned long long waits = 0;
  unsigned long long copies = 0;
  unsigned long long pageable_copies = 0;
  unsigned fail_after = 0;  // copies until the one that fails; 0: none
  CUresult fail_with = CUDA_SUCCESS;

  bool is_device(int device) const { return device >= 0 && device < static_cast<int>(devices.size()); }
  bool can_access_peer(int device, int peer) const { return peer_access && device != peer; }
  bool kernel_runs() const;
  void wait_for_kernels(Lock& lock);
  // Waits for all operations that are queued when it is called.
  void drain(Lock& lock);
  void destroy_primary_context(int device);
};

// Never destroyed: the workers use it until the process has ended.
Driver& driver();
bool is_forked_child();

// Begins a call of the driver: takes the lock and checks what the call needs.
class Call {
 public:
  enum Needs : unsigned {
    kDriver = 0,
    kContext = 1,   // a context that has not failed is current
    kNoKernel = 2,  // the call may wait for kernels: it does so
  };
  explicit Call(unsigned needs);
  CUresult error() const { return error_; }
  Lock& lock() { return lock_; }
  Context& context() { return *context_; }

 private:
  Lock lock_;
  CUresult error_ = CUDA_SUCCESS;
  Context* context_ = nullptr;
};

}  // namespace standin
